"""Read options from standard input, a list, and write what the program of tasksets says of each."""

import json
import runpy
import sys

loaded = runpy.run_path(sys.argv[1])["loaded"]
sys.stdout.write(json.dumps([loaded(options)[1] for options in json.load(sys.stdin)]))
