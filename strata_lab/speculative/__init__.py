"""Speculative decoding: guess the next tokens cheaply, check all guesses in one pass of the model, keep what is right.

`base.py` says what a drafter is; `ngram.py` and `draft_model.py` are two, and `feature_draft.py` is a draft model that
sees the target's hidden states, which every step of the target hands out (`feature_step.py`). `policy.py` decides how
many guesses are worth their cost, `speculator.py` brings both together once a step, `window.py` gives the guesses room
in a step and `verifier.py` says which of them came true. Where a GPU decodes ahead of the host, a draft model does so
too: `ahead.py` queues the cycles that `cycles.py` captures, on the state of `window_state.py`; `guesses.py` says what a
draft model does in them, `follow_rows.py` what one that sees states does behind a window. The text is the same with and
without: docs/decisions/0017-speculative-decoding.md.
"""
