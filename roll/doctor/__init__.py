"""``roll doctor``: what this host gives a run, found by looking (:mod:`.host`) and by trying (:mod:`.trials`)."""
