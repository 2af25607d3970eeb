"""Products of experts over frag16 tiles on Hopper: the decoders and tiles of linear/frag16_sm90 under a schedule of their own."""
