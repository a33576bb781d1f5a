"""The HTTP server: OpenAI's endpoints and a few of ours over one engine.

Needs the `serve` extra (fastapi, uvicorn, pydantic, orjson); nothing else of the package imports this one but the
command line. `run.py` starts it, `app.py` says which endpoints there are, `bridge.py` brings tokens from the engine
thread to asyncio.
"""
