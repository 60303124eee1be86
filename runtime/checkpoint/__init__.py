"""Tags, the checkpoints of a run: how they are found, saved, checked and read.

    tags.py         TagStore: finds, links and removes the tags of an out_dir, with summaries.py
    manifest.py     manifest.json: what it must hold
    saver.py        Saver: saves in the background, with staging.py and tag_writer.py
    buffers.py      tells if ranks have other buffers: a tag holds those of rank 0
    save_errors.py  why a save failed
    resume.py       the newest tag that all ranks find intact
    verify.py       the files of a tag against its manifest
    tag_reader.py   weights and optimizer state, of any stage and number of ranks
    load.py         a model from a tag, with model_config.py
    model_source.py tells if a model was edited since it was saved
    errors.py       what is wrong with a checkpoint
"""
