"""An OpenAI-compatible server (extra ``serve``). Start reading at ``scheduler.py``, then ``app.py``."""
