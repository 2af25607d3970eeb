"""Weight-only linear over frag16 tiles by mma.sync and cp.async, for every NVIDIA GPU from sm_80 on."""
