"""Which handler serves a path; the same table for the asyncio server and the thread server."""

import grpc


class Routes(grpc.GenericRpcHandler):
    """Finds the handler of a path. gRPC answers UNIMPLEMENTED where there is none."""

    def __init__(self) -> None:
        self._by_path: dict[str, grpc.RpcMethodHandler] = {}

    def add(self, path: str, handler: grpc.RpcMethodHandler) -> None:
        """Serves `path` by `handler`, which no other may serve."""
        if path in self._by_path:
            raise ValueError(f"{path} is served already")
        self._by_path[path] = handler

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """gRPC's question for each call."""
        return self._by_path.get(handler_call_details.method)
