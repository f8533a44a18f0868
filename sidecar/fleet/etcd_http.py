"""Calls to etcd (v3) by its own HTTP and JSON gateway, which every etcd since 3.4 has unless it was switched off.

Owns endpoints, TLS, the token of a user, and what an answer that is none means. Invariants: a call ends within
`TRY_S`, and tries each endpoint at most once, beginning with the one that answered last. It knows nothing of members.
"""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from ...session.errors import ConfigError, CoordinationError
from .bodies import lines, whole
from .coordination import TRY_S

# What gRPC calls them.
_NOT_FOUND, _PERMISSION_DENIED, _FAILED_PRECONDITION, _UNAUTHENTICATED = 5, 7, 9, 16
_INVALID_ARGUMENT = 3


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """How an etcd is reached. Files are read when the connection is made, the password at each log-in."""

    endpoints: Sequence[str]
    user: str = ""
    password_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""


class EtcdFault(CoordinationError):
    """etcd answered, and refused; `code` is gRPC's."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"etcd: {text}")
        self.code = code

    @property
    def is_not_found(self) -> bool:
        """There is no such lease."""
        return self.code == _NOT_FOUND

    @property
    def is_unauthenticated(self) -> bool:
        """It does not know who asks; where no token came with the request it calls that an invalid argument."""
        return self.code == _UNAUTHENTICATED or "user name is empty" in str(self)

    @property
    def is_precondition(self) -> bool:
        """Something is in the way: a lease of that number is there already."""
        return self.code == _FAILED_PRECONDITION


class EtcdHttp:
    """A client; needs a running event loop from its first call on."""

    def __init__(self, access: EtcdAccess) -> None:
        if not access.endpoints:
            raise ConfigError("etcd: no endpoint is named; set fleet.etcd_endpoints")
        self._access = access
        self._endpoints = [url.rstrip("/") for url in access.endpoints]
        self._tls = _tls(access)
        self._http: aiohttp.ClientSession | None = None
        self._token = ""

    async def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to `body` at `/v3/<path>`. EtcdFault when etcd refused, CoordinationError when nobody answered."""
        return await self._logged_in(lambda: self._anywhere(path, body, self._token))

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The answers to `body`, a line each, from where `call` was answered last. CoordinationError when they end.

        They may be silent for ever: whether that end still lives is found out by calls.
        """
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=TRY_S)
        try:
            async with self._session().post(
                f"{self._endpoints[0]}/v3/{path}", json=body, headers=self._headers(self._token), timeout=timeout
            ) as answer:
                async for line in lines(answer.content):
                    yield _result(answer.status, line)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise CoordinationError(f"etcd at {self._endpoints[0]}: the stream broke off ({_told(error)})") from error
        raise CoordinationError(f"etcd at {self._endpoints[0]}: ended the stream")

    async def close(self) -> None:
        """Let go of connections."""
        if self._http is not None:
            await self._http.close()

    async def _logged_in(self, ask: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        if self._access.user and not self._token:
            await self._log_in()
        try:
            return await ask()
        except EtcdFault as fault:
            # Tokens are forgotten by etcd after minutes without use, and when it is started again.
            if not (fault.is_unauthenticated and self._access.user):
                raise self._meant(fault) from fault
        await self._log_in()
        try:
            return await ask()
        except EtcdFault as fault:
            raise self._meant(fault) from fault

    def _meant(self, fault: EtcdFault) -> CoordinationError | ConfigError:
        if fault.is_unauthenticated or fault.code == _PERMISSION_DENIED:
            who = f"user {self._access.user}" if self._access.user else "nobody (fleet.etcd_user is not set)"
            return ConfigError(f"{fault} for {who}; give that user read and write access to the fleet's prefix")
        return fault

    async def _log_in(self) -> None:
        password = await asyncio.to_thread(_password, self._access.password_file)
        try:
            answer = await self._anywhere("auth/authenticate", {"name": self._access.user, "password": password}, "")
        except EtcdFault as fault:
            if fault.code in (_INVALID_ARGUMENT, _FAILED_PRECONDITION, _UNAUTHENTICATED):
                raise ConfigError(
                    f"{fault}; check fleet.etcd_user and fleet.etcd_password_file, and that etcd has users switched on"
                ) from fault
            raise
        self._token = str(answer.get("token", ""))

    async def _anywhere(self, path: str, body: Mapping[str, Any], token: str) -> dict[str, Any]:
        last = ""
        each_s = TRY_S * 0.9 / len(self._endpoints)
        for _ in range(len(self._endpoints)):
            url = self._endpoints[0]
            try:
                async with self._session().post(
                    f"{url}/v3/{path}",
                    json=body,
                    headers=self._headers(token),
                    timeout=aiohttp.ClientTimeout(total=each_s),
                ) as answer:
                    return _result(answer.status, await whole(answer.content))
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                last = f"{url}: {_told(error)}"
            except EtcdFault:
                raise
            except CoordinationError as error:
                last = f"{url}: {error}"
            except asyncio.CancelledError:
                self._pass_over(url)  # it was too slow for whoever asked, who asks the next one then
                raise
            self._pass_over(url)
        raise CoordinationError(f"etcd does not answer ({last}); is it up, and reached from here?")

    def _pass_over(self, url: str) -> None:
        # Several calls can find the same one silent at once.
        if self._endpoints[0] == url:
            self._endpoints.append(self._endpoints.pop(0))

    def _headers(self, token: str) -> dict[str, str]:
        return {"Authorization": token} if token else {}

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:
            # One stream, renewals, and a handful of claims at once.
            connector = aiohttp.TCPConnector(limit=16, ssl=self._tls)
            self._http = aiohttp.ClientSession(connector=connector, read_bufsize=1 << 20)
        return self._http


def _tls(access: EtcdAccess) -> ssl.SSLContext | bool:
    if not (access.ca_file or access.cert_file):
        return True
    try:
        context = ssl.create_default_context(cafile=access.ca_file or None)
        if access.cert_file:
            context.load_cert_chain(access.cert_file, access.key_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"etcd: certificates cannot be loaded ({error}); check fleet.etcd_ca, fleet.etcd_cert and fleet.etcd_key"
        ) from error
    return context


def _password(file: str) -> str:
    try:
        return Path(file).read_text().rstrip("\r\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"fleet.etcd_password_file: {file or '(not set)'} cannot be read ({error})") from error


def _result(status: int, body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CoordinationError(
            f"answered {status} and no JSON; is it etcd's client port, with its gateway on?"
        ) from error
    if not isinstance(said, dict):
        raise CoordinationError(f"answered {status} and no object; is it etcd's client port?")
    fault = said.get("error", said if status >= 400 else None)
    if fault is None:
        result = said.get("result", said)
        return result if isinstance(result, dict) else {}
    if isinstance(fault, dict):  # of a stream, or of etcd 3.5 and later
        code, text = fault.get("grpc_code", fault.get("code", said.get("code"))), fault.get("message")
    else:
        code, text = said.get("code"), fault
    # Unavailable, over a deadline, leaderless: others may be better off.
    if code in (None, 1, 2, 4, 8, 10, 13, 14):
        raise CoordinationError(f"answered {status}: {str(text)[:200]}")
    raise EtcdFault(int(code), str(text)[:200])


def _told(error: BaseException) -> str:
    return str(error) or type(error).__name__
