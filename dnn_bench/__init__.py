"""dnn_bench measures: models, baselines, emulated clusters, reports. Nothing imports it."""
