"""``bitmtp serve``: an OpenAI-compatible server."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from bitmtp.cli.options import ModelOptions, PolicyOptions, with_options
from bitmtp.errors import BitMTPError, ConfigError

if TYPE_CHECKING:
    from bitmtp.core.policy import Policy
    from bitmtp.server.options import ServerOptions
    from bitmtp.tuning.profile import Profile

KEYS_VARIABLE = "BITMTP_API_KEYS"


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """How much is done at once, and for how long."""

    slots: Annotated[int, Option(help="Texts that are written at once.")] = 8
    queue: Annotated[int, Option(help="Texts that may wait; beyond it requests get 429.")] = 64
    prefix_cache: Annotated[int, Option(metavar="MIB", help="K/V kept for prompts that begin alike.")] = 256
    timeout: Annotated[float, Option(metavar="SECONDS", help="Longest a request may take.")] = 600.0
    grace: Annotated[float, Option(metavar="SECONDS", help="What running requests get when the server stops.")] = 30.0
    max_body: Annotated[int, Option(metavar="MIB", help="Largest request.")] = 4
    max_connections: Annotated[int, Option(help="Beyond it the longest idle connection is closed.")] = 1000


@with_options
def serve(
    model: ModelOptions,
    decoding: PolicyOptions,
    limits: LimitOptions,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    name: Annotated[str | None, Option(help="What clients call the model; default: its folder's name.")] = None,
    api_key_file: Annotated[
        str | None, Option(metavar="FILE", help=f"API keys, one a line; or set {KEYS_VARIABLE} (comma-separated).")
    ] = None,
    cors_origin: Annotated[list[str] | None, Option(metavar="ORIGIN", help="Web origin that may call; repeat.")] = None,
    log_prompts: Annotated[bool, Option("--log-prompts", help="Log prompts and texts.")] = False,
    lenient: Annotated[
        bool, Option("--lenient/--strict", help="Ignore parameters that are not known, or refuse them.")
    ] = False,
    replicas: Annotated[int, Option(min=1, help="Engines behind one address, by Ray Serve (extra `ray`).")] = 1,
) -> None:
    """Serve the model as OpenAI's API does.

    At the same address is a page that shows how the model drafts.
    """
    # A client that goes away must not end the server, as it ends the other commands.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    profile = decoding.find_profile(model)
    policy = partial(decoding.make, profile=profile)
    options = _options(model, policy, limits, name, api_key_file, cors_origin, log_prompts)
    options = replace(options, lenient=lenient)
    if replicas > 1:
        _serve_replicas(model, profile, options, replicas, host, port)
        return
    from bitmtp.server import host as hosting
    from bitmtp.server.app import create_app

    sockets = hosting.listen(host, port)  # before the model is loaded: a port in use is reported at once
    app = create_app(model.load(profile), options)
    scheduler = app.state.scheduler
    print(f"bitmtp: {options.model_name} at http://{host}:{port}", file=sys.stderr)
    hosting.make_server(app, options, lambda: scheduler.stop(options.grace), lambda: scheduler.fault is None).run(
        sockets
    )
    if scheduler.fault is not None:
        raise BitMTPError(f"the backend writes no text any more ({scheduler.fault!r}); start the server again")


def _serve_replicas(
    model: ModelOptions, profile: Profile | None, options: ServerOptions, replicas: int, host: str, port: int
) -> None:
    try:
        from bitmtp.server.replicas import serve_replicas
    except ModuleNotFoundError as error:
        raise BitMTPError(f"{error.name} is not installed; install the extra: pip install 'bitmtp[ray]'") from None
    share = model.threads or max((os.cpu_count() or 1) // replicas, 1)
    print(f"bitmtp: {options.model_name} at http://{host}:{port}, {replicas} replicas are starting", file=sys.stderr)
    serve_replicas(partial(replace(model, threads=share).load, profile), options, replicas, host, port)


def _options(
    model: ModelOptions,
    policy: Callable[[int], Policy],
    limits: LimitOptions,
    name: str | None,
    api_key_file: str | None,
    cors_origin: list[str] | None,
    log_prompts: bool,
) -> ServerOptions:
    try:
        from bitmtp.server import logs
        from bitmtp.server.options import MIB, ServerOptions
    except ModuleNotFoundError as error:
        raise BitMTPError(f"{error.name} is not installed; install the extra: pip install 'bitmtp[serve]'") from None
    from bitmtp.checkpoint import read_config
    from bitmtp.models import shipped_model

    logs.to_stderr()
    folder = Path(model.model) if model.model is not None else shipped_model()
    return ServerOptions(
        model_name=name or folder.resolve().name,
        policy=policy(read_config(folder).block_size),
        slots=limits.slots,
        queue=limits.queue,
        prefix_cache_bytes=limits.prefix_cache * MIB,
        timeout=limits.timeout,
        grace=limits.grace,
        max_body_bytes=limits.max_body * MIB,
        max_connections=limits.max_connections,
        api_keys=_keys(api_key_file),
        cors_origins=tuple(cors_origin or ()),
        log_prompts=log_prompts,
    )


def _keys(file: str | None) -> tuple[str, ...]:
    """API keys from the environment and a file; they are never printed."""
    listed = os.environ.get(KEYS_VARIABLE, "").split(",")
    if file is not None:
        listed += Path(file).read_text(encoding="utf-8").splitlines()
    keys = tuple(key.strip() for key in listed if key.strip())
    if file is not None and not keys:
        raise ConfigError(f"{file}: holds no API key")
    return keys
