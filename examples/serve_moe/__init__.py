"""A server of handwritten digits whose mixture of experts is sharded over ranks.

    ruda-async run -n 4 examples/train_digits_moe.py --save digits.npz
    ruda-async run -n 4 --keep-going --grace 15 examples/serve_moe --model digits.npz

Rank 0, the *front*, speaks HTTP and holds everything but the experts; the other ranks hold the experts. All
run the same event-loop code. A batch of rows is one call of `ruda_async.moe.aio.moe_layer` on a channel of
its own, so several batches are under way at once. ``docs/serving.md`` says how it behaves and how to size it.

* `options`: the command line
* `placement`: which rank holds which experts, also after one was lost
* `shard`: the part of the model that one rank holds
* `exchange`: how a batch passes through all ranks
* `generation`: the ranks that work together, until one is lost or a new one comes
* `rank`: the life of a rank over its generations; of a worker
* `front`: of the front: dispatching, growing
* `measures`, `metrics`: what is counted, and how it is shown
* `batching`: requests, the queue, batches
* `web`: HTTP
* `gloo`: for comparison, the exchange over torch.distributed in threads
* `load`: the load test
"""
