"""Write many texts whose rows share passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bitmtp.engine import Engine, Generation, Request, Session

_TURN = 16.0  # milliseconds between two looks at what has ended


def write_texts(engine: Engine, requests: Sequence[Request], batch: int) -> Iterator[tuple[int, Generation]]:
    """The texts of ``requests``, each with its index, in the order in which they end.

    Up to ``batch`` are written at a time; the next one begins as soon as one ends, unlike in
    :meth:`Engine.generate_batch`, whose passes thin out while the longest text is written. No text depends on it.
    """
    waiting = iter(enumerate(requests))
    running: dict[int, tuple[Session, Generation]] = {}
    try:
        while True:
            while len(running) < batch and (following := next(waiting, None)):
                running[following[0]] = _begin(engine, following[1])
            if not running:
                return
            engine.loop.run([generation.text for _, generation in running.values()], _TURN)
            for index, (session, generation) in list(running.items()):
                while generation.take():
                    pass
                if generation.text.finish is not None:
                    del running[index]
                    session.close()
                    yield index, generation
    finally:
        for session, _ in running.values():
            session.close()


def _begin(engine: Engine, request: Request) -> tuple[Session, Generation]:
    session = engine.session()
    try:
        generation = session.generate(request)
    except BaseException:
        session.close()
        raise
    return session, generation
