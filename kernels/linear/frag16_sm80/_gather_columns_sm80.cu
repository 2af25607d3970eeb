// Columns of x for GPUs from sm_80 on (gather_columns.h).
#define GM_ENTRY gm_gather_columns_sm80
#include "linear/frag16_sm90/gather_columns.h"
