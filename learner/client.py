"""The trainer's side of the network: a small synchronous client that any trainer can drive.

Must not know torch, libp2p or trio. Control messages go over a Unix socket in the run directory; bulk goes through
files there (micro-batches, chunks), never through the socket.

    client = LearnerClient.connect(run_dir)
    start = client.resume()                     # epoch, step, checkpoint to load or None
    client.publish(start.step, tensors)         # first version: an anchor
    while step < steps:
        for batch in client.batches(step):      # MicroBatch; the last one has .last
            ...accumulate gradients...
        ...optimizer step; step += 1; write a checkpoint folder, fsynced...
        client.commit(step, checkpoint)         # names the checkpoint and marks the step's groups consumed, atomically
        client.publish(step, tensors)           # the new weights
        client.log(step, metrics)
    client.finish()
"""
