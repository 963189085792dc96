"""RULER's tasks: synthetic prompts of any length that contain the answers to their questions.

References:
    Hsieh et al. 2024, "RULER: What's the Real Context Size of Your Long-Context Language Models?", and
    https://github.com/NVIDIA/RULER at c3f5e3b, the source of templates and counts.
"""
