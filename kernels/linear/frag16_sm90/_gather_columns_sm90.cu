// Columns of x for Hopper.
#define GM_ENTRY gm_gather_columns_sm90
#define GM_OVERLAP
#include "gather_columns.h"
