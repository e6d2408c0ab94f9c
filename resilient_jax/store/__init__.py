"""Store of the facts that the hosts of a job agree on: keys, leases, watches and transactions, as in etcd.

See README.md in this folder. `memory` is the store of this process, `service` serves it, `remote` is the client of a
store in another process; only `service` and `remote` import gRPC.
"""
