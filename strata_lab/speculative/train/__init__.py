"""Trains a head-light draft: a few layers that guess what a model would say, over its most frequent tokens.

`prompts.py` and `making.py` have the target write texts, `texts.py` sorts them, `vocabulary.py` counts their tokens,
`network.py` is the draft in plain torch, `lessons.py` and `features.py` are what a draft of each kind learns,
`training.py` distils the target into it, `measure.py` says how many guesses would come true and `export.py` writes the
folder. `recipe.py` runs all of it, `__main__.py` where there is no command line of ours.
docs/decisions/0018-a-trained-draft.md says why it is made like this, 0028-a-draft-that-sees-states.md why there is a
second kind.
"""
