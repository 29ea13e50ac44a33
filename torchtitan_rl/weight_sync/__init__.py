"""Weights from the trainer's ranks to the generators.

Each rank publishes what it owns (`snapshot.Publisher`) and gets a handle; the controller merges the
ranks' handles and sends the result; a reader opens it (`reading.open_snapshot`) and gets whole
tensors, one at a time. Transports differ only in where the bytes lie: `shm`, `rdma`, `file`.
"""
