"""The pool in other people's training loops: `transformers` and `lightning`, one callback each.

Importing `stagehand_alloc` imports none of them, and this folder neither of the libraries.
"""
