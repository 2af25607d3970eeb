"""Products of experts over frag16 tiles on sm_80 and newer: the operands and tiles of linear/frag16_sm80 under a schedule of their own."""
