"""Trains a head-light draft: a few layers that guess what a model would say, over its most frequent tokens.

`prompts.py`, `making.py` and `writing.py` have the target write texts, `texts.py` sorts them, `vocabulary.py` counts
their tokens, `network.py` is the draft in plain torch, `told.py` what the target says of texts, `lessons.py` and
`features.py` are what a draft of each kind learns, `training.py` distils the target into it, `measure.py` says how many
guesses would come true and `export.py` writes the folder. `recipe.py` runs all of it, `__main__.py` where there is no
command line of ours.
docs/decisions/0018-a-trained-draft.md says why it is made like this, 0028-a-draft-that-sees-states.md why there is a
second kind, 0033-states-of-several-layers.md what that one sees.
"""
