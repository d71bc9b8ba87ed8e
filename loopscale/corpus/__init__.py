"""Text sources -> tokenizer -> streaming (MDS) shards -> batches in an order free of layout.

Writing: ``build`` (with ``documents``, ``arrange``, ``stages``, ``tokenizer``, ``contamination``, ``progress``). Reading:
``folder`` (what a corpus says about itself), ``shards`` (records, through mosaicml-streaming), ``packing`` (samples),
``order`` (which sample comes when), ``batches`` (what one data-parallel rank trains on), ``baselines``, ``show``.

Nothing is imported here: torch and streaming load only with the modules that need them.
"""
