"""Objects in a bucket of S3, or of what speaks as S3 does: for cold snapshots.

Owns the client and its bounds. Invariant: no call waits longer than READ_S for the next byte, and what is brought ends
within CALL_S and the time of its bytes; what is sent or asked has no such end, for its answers are short. An object is
seen whole (S3 gives read-after-write and lists what was written). Credentials are boto3's own business: variables,
files, or the role of the machine. It needs boto3, which is installed for it alone.
"""

import importlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from ...session.errors import ConfigError
from .contract import Refusal, ReplicaError

CONNECT_S = 3.0
READ_S = 10.0
CALL_S = 15.0
BYTES_PER_S_MIN = 1 << 20
CONNECTIONS = 16
# S3's own bound for one request.
REMOVE_AT_ONCE = 1000
PIECE_BYTES = 1 << 20

T = TypeVar("T")


class S3Objects:
    """See contract.Objects."""

    lists_folders = True

    def __init__(self, bucket: str, *, endpoint: str | None = None, region: str | None = None) -> None:
        try:
            boto3 = importlib.import_module("boto3")
            config = importlib.import_module("botocore.config")
            self._exceptions = importlib.import_module("botocore.exceptions")
        except ImportError as error:
            raise ConfigError('snapshots in S3 need boto3; pip install "midstream[s3]"') from error
        self._bucket = bucket
        self._client = boto3.session.Session().client(
            "s3",
            endpoint_url=endpoint,
            region_name=region,
            config=config.Config(
                connect_timeout=CONNECT_S,
                read_timeout=READ_S,
                max_pool_connections=CONNECTIONS,
                # Whoever sends knows when to try again.
                retries={"total_max_attempts": 1},
                tcp_keepalive=True,
            ),
        )
        self._askers = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="s3")

    def put(self, name: str, content: bytes) -> None:
        """See Objects.put."""
        self._call(name, lambda: self._client.put_object(Bucket=self._bucket, Key=name, Body=content))

    def replace(self, name: str, content: bytes) -> None:
        """See Objects.replace."""
        self.put(name, content)

    def get(self, name: str, bytes_max: int) -> bytes | None:
        """See Objects.get."""

        def get() -> bytes | None:
            answer = self._client.get_object(Bucket=self._bucket, Key=name)
            size = int(answer["ContentLength"])
            with answer["Body"] as body:
                if size > bytes_max:
                    raise ReplicaError(Refusal.TOO_LARGE, f"object {name}: {size} bytes; {bytes_max} are taken")
                return _read(body, size)

        try:
            return self._call(name, get)
        except ReplicaError as error:
            if error.reason is Refusal.MISSING:
                return None
            raise

    def present(self, names: Collection[str]) -> frozenset[str]:
        """See Objects.present. S3 answers for one at a time, so many are asked at once."""
        asked = list(names)
        return frozenset(
            name for name, is_there in zip(asked, self._askers.map(self._is_there, asked), strict=True) if is_there
        )

    def remove(self, names: Iterable[str]) -> None:
        """See Objects.remove."""
        every = list(names)
        for at in range(0, len(every), REMOVE_AT_ONCE):
            objects = [{"Key": name} for name in every[at : at + REMOVE_AT_ONCE]]
            request = {"Bucket": self._bucket, "Delete": {"Objects": objects, "Quiet": True}}
            answer = self._call(every[at], partial(self._client.delete_objects, **request))
            if answer.get("Errors"):
                first = answer["Errors"][0]
                raise ReplicaError(Refusal.INTERNAL, f"object {first.get('Key')}: not removed, {first.get('Code')}")

    def list(self, prefix: str, count_max: int) -> Mapping[str, int] | None:
        """See Objects.list."""
        found: dict[str, int] = {}
        token: dict[str, str] = {}
        while True:
            listing = partial(self._client.list_objects_v2, Bucket=self._bucket, Prefix=prefix, **token)
            answer = self._call(prefix, listing)
            found |= {entry["Key"]: int(entry["Size"]) for entry in answer.get("Contents", ())}
            if len(found) > count_max:
                return None
            if not answer.get("IsTruncated"):
                return found
            token = {"ContinuationToken": answer["NextContinuationToken"]}

    def close(self) -> None:
        """See Objects.close."""
        self._askers.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def _is_there(self, name: str) -> bool:
        try:
            self._call(name, lambda: self._client.head_object(Bucket=self._bucket, Key=name))
        except ReplicaError as error:
            if error.reason is Refusal.MISSING:
                return False
            raise
        return True

    def _call(self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except self._exceptions.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            raise ReplicaError(_reason(code, status), f"object {name}: {code or status}; look at the bucket") from error
        except (self._exceptions.ConnectTimeoutError, self._exceptions.ReadTimeoutError) as error:
            raise ReplicaError(Refusal.SLOW, f"object {name}: {error}") from error
        except (self._exceptions.BotoCoreError, self._exceptions.HTTPClientError, OSError) as error:
            raise ReplicaError(Refusal.UNREACHABLE, f"object {name}: {error}; look at the endpoint") from error


def _read(body: Any, size: int) -> bytes:
    """Read in pieces, so that one that trickles is given up in time."""
    deadline = time.monotonic() + CALL_S + size / BYTES_PER_S_MIN
    content = bytearray()
    while len(content) < size:
        piece = body.read(min(PIECE_BYTES, size - len(content)))
        if not piece:
            raise ReplicaError(Refusal.UNREACHABLE, f"an object ended after {len(content)} of {size} bytes")
        content += piece
        if time.monotonic() > deadline:
            raise ReplicaError(Refusal.SLOW, f"{len(content)} of {size} bytes came in time")
    return bytes(content)


def _reason(code: str, status: object) -> Refusal:
    # A bucket that is not there is nothing that was lost.
    if code in ("NoSuchKey", "404", "NotFound"):
        return Refusal.MISSING
    if status in (401, 403):
        return Refusal.UNAUTHORIZED
    if status in (429, 503):
        return Refusal.BUSY
    return Refusal.FULL if status == 507 else Refusal.INTERNAL
