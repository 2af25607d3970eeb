// The scheduler of latent attention for Hopper on a CPU, by a warp of fibers, for test_mla_sm90_work.py.
#include "wgmma_fibers.h"

namespace gm {

inline unsigned min(unsigned a, int b) { return std::min(a, unsigned(b)); }  // as CUDA has it

}  // namespace gm

#include "../../kernels/attention/mla_attention/sm90/_mla_work_sm90.cuh"

namespace {

// Of a launch: what each range processes, in the order of tickets. work: [most] rows of ticket, sequence, and the numbers of an MlaWork.
struct Schedule {
  gm::mla::MlaParams p;
  int* work;
  int most, count, ranges;
};

void list(void* parameters) {
  Schedule& all = *static_cast<Schedule*>(parameters);
  if (blockIdx.x != 0) return;
  gm::mla::MlaScheduler scheduler(all.p);
  const int ranges = scheduler.ranges();
  if (gm::thread() == 0) all.ranges = ranges;
  for (int ticket = 0; ticket < ranges; ++ticket) {
    scheduler.start(ticket);
    gm::mla::MlaWork w;
    int seq;
    while (scheduler.next(w, seq)) {
      if (gm::thread() != 0 || all.count == all.most) continue;
      const int numbers[] = {ticket,  seq,     w.kind, w.token, w.row0, w.rows,  w.position,
                             w.first, w.count, w.end,  w.slot,  w.part, w.parts, w.first_range};
      std::memcpy(all.work + all.count++ * 14, numbers, sizeof numbers);
    }
  }
}

}  // namespace

// The number of ranges, -1 if lanes wait for each other in vain. count: of the rows of work.
extern "C" int schedule_on_cpu(const int* query_start, const int* seq_lens, int seqs, int heads, int ctas,
                               int least, int slack, int* work, int most, int* count) {
  Schedule all{{}, work, most, 0, 0};
  all.p.query_start = query_start, all.p.seq_lens = seq_lens, all.p.seqs = seqs, all.p.heads = heads;
  all.p.least = least, all.p.slack = slack, all.p.by_heads = gm::reciprocal(heads);
  if (!gm::launch_grid(list, &all, ctas, 32, 16)) return -1;
  *count = all.count;
  return all.ranges;
}
