"""What the notebooks call: a loaded model with its machine's figures, measurements, charts, and exercises that answer.

A cell stays short because its work is here; the figures it shows are measured where it runs. Nothing here decodes: the
engine does, through its public calls, and every time comes from its events.
"""
