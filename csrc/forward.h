/* The checks of the forward pass (forward_check.c). */
#ifndef MINSERVE_FORWARD_H
#define MINSERVE_FORWARD_H

#include "core.h"

enum { MS_MOST_HEAD = 256 }; /* values in a head */

/* Pointers, sizes and types of a model; then of a cache, and of a step, that go with it. */
int ms_check_model(const ms_model *model);
int ms_check_cache(const ms_kv_cache *cache, const ms_model *model);
int ms_check_batch(const ms_batch *batch, const ms_model *model, const ms_kv_cache *cache);

#endif
