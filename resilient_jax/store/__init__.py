"""What the hosts of a job agree on: keys, leases, watches, transactions, in etcd's words.

See README.md in this folder. `memory` is the store in this process, `embedded` serves it, `remote` is
the store of another process; only the last two import gRPC.
"""
