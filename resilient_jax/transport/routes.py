"""The table of handlers by method path."""

import grpc


class Routes(grpc.GenericRpcHandler):
    """Finds the handler of a path; without one gRPC answers UNIMPLEMENTED."""

    def __init__(self) -> None:
        self._by_path: dict[str, grpc.RpcMethodHandler] = {}

    def add(self, path: str, handler: grpc.RpcMethodHandler) -> None:
        """Serve `path` by `handler`.

        Raises:
            ValueError: another handler serves the path.
        """
        if path in self._by_path:
            raise ValueError(f"{path}: found a second handler, expected one for each path")
        self._by_path[path] = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return the handler of a call, for gRPC, or None."""
        return self._by_path.get(handler_call_details.method)
