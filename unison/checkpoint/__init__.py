"""The atomic, checksummed store of a run's state. Knows named tensors, documents and blobs, and nothing of trainers.

``save.Saver`` writes, ``load.load_newest`` reads. The folder of checkpoints looks like this:

    step-000012/               a complete checkpoint; a second save of one step is step-000012.1
        manifest.json          size and SHA-256 of each file, written last, and its own digest
        masters-00001.safetensors   a shard of the group `masters`
        cursor.json            the document `cursor`
        buffer.bin             the blob `buffer`
    latest.json                a hint which one was completed last
    .tmp-...                   a save in progress, or one that was killed
    .del-...                   a deletion in progress, or one that was killed
"""
