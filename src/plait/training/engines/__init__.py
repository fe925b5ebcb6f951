"""How steps are computed: data parallel, pipelined, decentralized, pipelines side by side."""
