/* Threads: the only file with OpenMP in it.
 *
 * Which thread does which piece never changes a result, because no sum crosses two pieces.
 */
#include "core.h"

#ifdef _OPENMP
#include <omp.h>
#endif

void ms_parallel(int threads, int64_t n, int64_t chunk, ms_task *task, const void *job) {
    int64_t pieces = ms_ceil_div(n, chunk);
    threads = (int)ms_min(threads, pieces);
    if (threads <= 1) {
        if (n > 0) task(job, 0, n, 0);
        return;
    }
#ifdef _OPENMP
    int64_t piece;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (piece = 0; piece < pieces; piece++)
        task(job, piece * chunk, ms_min(n, (piece + 1) * chunk), omp_get_thread_num());
#else
    task(job, 0, n, 0);
#endif
}

int ms_openmp(void) {
#ifdef _OPENMP
    /* Any question starts the library: LLVM's and Intel's read their environment only then. */
    return omp_get_max_threads() > 0 ? _OPENMP : 0;
#else
    return 0;
#endif
}
