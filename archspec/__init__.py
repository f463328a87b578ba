"""What a draft is: its spec, the module that a spec builds, what it costs, and the layouts it is stored in."""
