"""Weights from the trainer's ranks to the generators, over shared memory, TCP, RDMA or files.

Each rank publishes its shards (`snapshot.Publisher`) and gets a handle. The controller merges the
ranks' handles and sends the result. A reader opens it (`reading.open_snapshot`) and gets whole
tensors, one at a time. Transports differ only in where the bytes lie: `shm`, `rdma`, `file`. With
`relay` the controller first has them copied to each host (`spread.spread`).
"""

from torchtitan_rl.platform.third_party import prepare

prepare()
