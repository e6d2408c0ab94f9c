"""The client of one peer for synchronous processes."""

from collections.abc import Generator
from types import TracebackType
from typing import Any, Self, cast

import grpc

from resilient_jax.errors import ResilientJaxError
from resilient_jax.transport.authentication import TOKEN_METADATA_KEY
from resilient_jax.transport.credentials import Credentials, channel_credentials
from resilient_jax.transport.error_codec import decode_error
from resilient_jax.transport.grpc_options import channel_options
from resilient_jax.transport.method import Method, RequestT, ResponseT, decode, encode, format_method_path


class SyncChannel:
    """Calls methods of the server at `address`, blocking; safe to share between threads.

    As `Channel`: connects when first used, reconnects by itself, repeats no call.
    """

    def __init__(self, address: str, credentials: Credentials) -> None:
        """Connects to nothing yet.

        Raises:
            ConfigError: a TLS file cannot be read.
        """
        self.address = address
        self._metadata = ((TOKEN_METADATA_KEY, credentials.token),)
        tls = credentials.tls
        if tls is None:
            self._channel = grpc.insecure_channel(address, channel_options(None))
        else:
            self._channel = grpc.secure_channel(
                address, channel_credentials(tls), channel_options(tls.server_name)
            )

    def call(
        self, service: str, method: Method[RequestT, ResponseT], request: RequestT, *, timeout_s: float
    ) -> ResponseT:
        """The response to `request`; raises as `Channel.call`."""
        assert not method.is_streaming, f"{method.name} streams: use stream()"
        path = format_method_path(service, method)
        try:
            unary = self._channel.unary_unary(path)
            data = unary(encode(request), timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._ours(error, path, timeout_s) from error
        except ValueError as error:  # gRPC's word for a closed channel
            raise self._closed(path) from error
        return decode(cast(bytes, data), method.response, f"response to {path} from {self.address}")

    def stream(
        self,
        service: str,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        *,
        timeout_s: float | None = None,
    ) -> Generator[ResponseT, None, None]:
        """The responses to `request` as they come; close the generator to end the call.

        Raises as `Channel.stream`.
        """
        assert method.is_streaming, f"{method.name} does not stream: use call()"
        path = format_method_path(service, method)
        where = f"response to {path} from {self.address}"
        try:
            call = self._channel.unary_stream(path)(
                encode(request), timeout=timeout_s, metadata=self._metadata
            )
        except ValueError as error:  # gRPC's word for a closed channel
            raise self._closed(path) from error
        try:
            for data in call:
                yield decode(cast(bytes, data), method.response, where)
        except grpc.RpcError as error:
            raise self._ours(error, path, timeout_s) from error
        finally:
            call.cancel()

    def close(self) -> None:
        """Ends the connection and every call on it."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ours(self, error: grpc.RpcError, path: str, timeout_s: float | None) -> ResilientJaxError:
        call = cast(
            Any, error
        )  # an RpcError that a call raises is also a grpc.Call; its type does not say so
        return decode_error(
            call.code(),
            call.details(),
            call.trailing_metadata(),
            address=self.address,
            path=path,
            timeout_s=timeout_s,
        )

    def _closed(self, path: str) -> ResilientJaxError:
        return decode_error(
            grpc.StatusCode.CANCELLED, None, None, address=self.address, path=path, timeout_s=None
        )
