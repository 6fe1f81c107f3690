"""The processes of a server: a single worker, or a parent with several workers on one socket."""

import asyncio
import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from recpo.artifacts.documents import describe_os_error
from recpo.base.errors import RecpoError
from recpo.server.impressions import settle
from recpo.server.options import Keys, ServerOptions
from recpo.server.service import SHARED, Service, log_as_json
from recpo.server.variants import open_variants

_BACKLOG = 2048
_GRACE_S = 5.0  # added to timeout and drain, for requests that run when the server is stopped
#: least and most time for requests on connections that were open when the server stopped listening
_LAST_REQUESTS_S = (0.5, 3.0)
_HANDSHAKES_S = 0.2  # connections that have begun arrive in this time
_RESTART_S = 1.0
_SOON_S = 10.0  # a worker that ends sooner never became ready
_ATTEMPTS = 3
_SO_ATTACH_FILTER = 26  # of Linux; Python has no name for it
#: a classic BPF program: drop (0 bytes) what has the flag SYN without ACK in byte 13 of its TCP header, keep the rest
_NO_SYN = ((0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
_LOG = logging.getLogger("recpo.server")


def run_server(bundle: Path | None, options: ServerOptions) -> None:
    """Serves until SIGTERM or SIGINT, then answers the requests that have arrived and returns.

    SIGHUP switches to the newest version.

    Raises:
        RecpoError: the bundle cannot serve, the log cannot be written, or the address is in use.
    """
    log_as_json()
    for keys in (options.api_keys, options.admin_keys):
        if keys is not None:
            Keys(keys)
    listening = _bind(options.host, options.port)
    with listening:
        if options.workers == 1:
            _work(bundle, options, listening)
        else:
            open_variants(bundle, options)  # faults of the bundles and of the log's directory are reported here, once
            with tempfile.TemporaryDirectory(prefix="recpo-metrics-") as shared:
                os.environ[SHARED] = shared  # which workers inherit
                try:
                    _Parent(bundle, options, listening).run()
                finally:
                    del os.environ[SHARED]
    if options.log is not None and options.publish_on_stop:
        settled = settle(options.log)
        _LOG.info("published", extra={"fields": {"rows": settled.rows, "files": settled.files}})


class _Worker(uvicorn.Server):
    """Uvicorn with a drain period: not ready first, no more connections later. It does not re-raise the signal."""

    def __init__(self, config: uvicorn.Config, service: Any, drain_s: float) -> None:
        super().__init__(config)
        self._service, self._drain_s = service, drain_s
        self._deaf_at: float | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the server, SIGHUP swaps."""
        handlers = {signal.SIGTERM: self.handle_exit, signal.SIGINT: self.handle_exit, signal.SIGHUP: self._reload}
        with _handling(handlers):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; a second one stops at once."""
        if self._deaf_at is None:
            self._service.draining = True
            self._deaf_at = time.monotonic() + self._drain_s
            _LOG.info("draining", extra={"fields": {"signal": signal.Signals(sig).name, "seconds": self._drain_s}})
        else:
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """True when it is time to stop listening."""
        if self._deaf_at is not None and time.monotonic() >= self._deaf_at:
            self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops without resetting a connection.

        The system resets the connections that wait for being accepted when the last process closes the socket, so they
        are accepted before, and none may begin between the last one and the end of the socket. It also resets a
        connection that is closed while its request arrives. Uvicorn closes idle connections at once; here they get up
        to three seconds, in which every answer tells its client to close the connection, and which are over early if
        no connection is open. Those just accepted are not yet counted as open.
        """
        for listening in sockets or []:
            begin_no_connections(listening)
        await asyncio.sleep(_HANDSHAKES_S)
        waiting = [connection for listening in sockets or [] for connection in _accepted(listening)]
        for server in self.servers:
            server.close()
        protocol: Any = self.config.http_protocol_class  # called as in ``uvicorn.Server.startup``
        state = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        for connection in waiting:
            await asyncio.get_running_loop().connect_accepted_socket(partial(protocol, **state), connection)
        least, most = (time.monotonic() + seconds for seconds in _LAST_REQUESTS_S)
        while time.monotonic() < (most if self.server_state.connections else least):
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)

    def _reload(self, sig: int, frame: FrameType | None) -> None:
        threading.Thread(target=self._swap, name="recpo-swap", daemon=True).start()

    def _swap(self) -> None:
        try:
            for versions in self._service.of_variant.values():
                versions.swap()
        except RecpoError as error:
            _LOG.error("the bundle stays %s: %s", versions.current.version, error)


def _work(bundle: Path | None, options: ServerOptions, listening: socket.socket) -> None:
    from recpo.server.app import create_app  # after the parent has set where metrics are shared

    service = Service(bundle, options)
    config = uvicorn.Config(
        create_app(service),
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        lifespan="on",
        timeout_graceful_shutdown=int(options.timeout_s + _GRACE_S),
    )
    current = service.versions.current
    fields = {
        "address": _address(listening),
        "bundle": current.name,
        "version": current.version,
        "checksum": current.checksum,
        "golden_requests": current.golden,
        "log": options.log,
    }
    if options.variants:
        served = {name: one.current.version for name, one in service.of_variant.items()}
        fields |= {"experiment": options.experiment, "variants": served}
    _LOG.info("serving", extra={"fields": fields})
    _Worker(config, service, options.drain_s).run(sockets=[listening])
    _LOG.info("stopped")


def _child(bundle: Path | None, options: ServerOptions, listening: socket.socket) -> None:
    """Runs a worker process."""
    log_as_json()
    threading.Thread(target=_end_with_parent, name="recpo-parent", daemon=True).start()
    try:
        _work(bundle, options, listening)
    except RecpoError as error:
        _LOG.error("%s", error)
        raise SystemExit(1) from error


def _end_with_parent() -> None:
    """Stops this worker if its parent has died."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


class _Parent:
    """Starts workers, forwards signals, and replaces workers that die, until the server is stopped."""

    def __init__(self, bundle: Path | None, options: ServerOptions, listening: socket.socket) -> None:
        self._bundle, self._options, self._listening = bundle, options, listening
        self._stopping = threading.Event()
        self._workers: list[tuple[Any, float]] = []
        self._early = 0

    def _start(self) -> tuple[Any, float]:
        arguments = self._bundle, self._options, self._listening
        process = multiprocessing.get_context("spawn").Process(target=_child, args=arguments)
        process.start()
        return process, time.monotonic()

    def run(self) -> None:
        handlers = {signal.SIGTERM: self._stop, signal.SIGINT: self._stop, signal.SIGHUP: self._pass_on}
        with _handling(handlers):
            self._workers = [self._start() for _ in range(self._options.workers)]
            try:
                while not self._stopping.wait(_RESTART_S):
                    self._replace_the_dead()
            finally:
                self._end()

    def _replace_the_dead(self) -> None:
        from prometheus_client.multiprocess import mark_process_dead

        for place, (worker, begun) in enumerate(self._workers):
            if worker.is_alive():
                continue
            mark_process_dead(worker.pid)
            self._early = self._early + 1 if time.monotonic() - begun < _SOON_S else 0
            if self._early >= _ATTEMPTS:
                message = f"{_ATTEMPTS} workers ended as soon as they began: the log above says why"
                raise RecpoError(message, code="failed")
            _LOG.error("worker %d ended with status %s: another one takes its place", worker.pid, worker.exitcode)
            self._workers[place] = self._start()

    def _stop(self, sig: int, frame: FrameType | None) -> None:
        self._stopping.set()

    def _pass_on(self, sig: int, frame: FrameType | None) -> None:
        for worker, _ in self._workers:
            if worker.is_alive():
                os.kill(worker.pid, sig)

    def _end(self) -> None:
        """Sends SIGTERM to all workers, and kills those that do not end in time.

        The parent closes its copy of the socket first: it would keep the socket open when no worker accepts any more,
        and the connections that arrive then would be reset in the end.
        """
        self._listening.close()
        for worker, _ in self._workers:
            worker.terminate()
        until = time.monotonic() + self._options.drain_s + self._options.timeout_s + 2 * _GRACE_S
        for worker, _ in self._workers:
            worker.join(max(0.1, until - time.monotonic()))
            if worker.is_alive():
                _LOG.error("worker %d does not end: killed", worker.pid)
                worker.kill()
                worker.join()


@contextmanager
def _handling(handlers: dict[signal.Signals, Any]) -> Iterator[None]:
    """Installs these signal handlers for the block. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sig: signal.signal(sig, handler) for sig, handler in handlers.items()}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket. Connections fail until a worker listens."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        reason = describe_os_error(error, f"{host}:{port}")
        message = f"cannot listen at {host}:{port} ({reason}): choose another --host or --port"
        raise RecpoError(message, code="in_use", field="port") from error
    listening.set_inheritable(True)
    return listening


def begin_no_connections(listening: socket.socket) -> None:
    """Drops the first packet of further connections; those that have begun arrive. On Linux only.

    Their clients try again a second later, and are refused if nobody listens then.
    """
    if sys.platform != "linux":
        return
    size = len(_NO_SYN)
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in _NO_SYN))
    with suppress(OSError):  # a kernel that has no filters
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", size, ctypes.addressof(filters)))


def _accepted(listening: socket.socket) -> Iterator[socket.socket]:
    """The connections that wait for being accepted."""
    with suppress(OSError):  # none is left
        while True:
            connection, _ = listening.accept()
            connection.setblocking(False)
            yield connection


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
