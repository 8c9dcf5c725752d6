"""Write many texts whose rows share passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bitmtp.decoding.decoder import advance
from bitmtp.engine import Engine, Generation, Request, Session


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
            advance(engine.backend, [generation.decoder for _, generation in running.values()])
            for index, (session, generation) in list(running.items()):
                generation.take()
                if generation.decoder.finish is not None:
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
        generation.start()
    except BaseException:
        session.close()
        raise
    return session, generation
