"""Records the live state of a Python training loop, and restores it in another process.

    position    where the script is: loops, call sites, which variables are alive
    values      what its variables hold, as nodes that can be packed, compared and restored
    records     the record of a boundary, and its slots in shared memory
    data        iterators over loaders
    effects     what the script has written: files, output, trackers

May import: introspect, device, protocol. Begin with records/boundary_record.py.
"""
