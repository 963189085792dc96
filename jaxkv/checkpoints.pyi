from checkpoints import *
