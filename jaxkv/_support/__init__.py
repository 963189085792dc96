"""What enters is checked and converted under jaxkv's own settings; what goes wrong is said in one wording."""
