"""What `rescaling_demo.py` needs and a user need not read: a corpus, a model, processes, a report."""
