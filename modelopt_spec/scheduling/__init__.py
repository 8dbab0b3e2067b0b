"""Confidence calibration, step costs, the prefix scheduler, its file, and the serving simulation.

==========================  =========================================================================================
module                      what it holds
==========================  =========================================================================================
``rounds``                  recorded verification rounds as arrays
``metrics``                 ECE, reliability bins, AUC, Brier score
``calibration``             sequential temperature scaling
``calibrate``               rounds to a calibration report (``calibrate_rounds``, ``calibration_section``)
``cost``, ``cost_fit``      step-time tables and their fit; ``cost_extend`` carries them beyond the measured batches
``cost_measure``            timing of verification steps; ``profile`` makes a checked table of it (``profile_cost``)
``engine_tables``           the engines' own files, both directions
``prefix_scheduler``        Algorithm 1 and the global search, with ``prefix_scheduler_reference``
``policies``                lengths a step: nothing, fixed, threshold, ``PrefixScheduler``
``scheduler_file``          ``scheduler.json``; ``export`` writes the engines' files and launch lines from it
``workload``                requests and their acceptance process
``simulation``              continuous batching, with ``simulation_reference``; ``sweep`` draws curves over loads
==========================  =========================================================================================
"""
