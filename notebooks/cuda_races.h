// A detector of races in shared memory, for cuda_emulation.cpp: vector clocks of threads, as in FastTrack.
//
// Every thread has a clock for every thread of the CTA: the last step of that one that happened before its own. A barrier joins
// the clocks of the threads that arrive, and those that wait for it take the result. Lanes of a warp are ordered by `warp_barrier`,
// and not by shuffles, matrix loads or products: these exchange registers. Two accesses to a word race if one of them writes
// and neither happened before the other. A copy (cp.async) writes at any time between its start and the wait of its thread.
//
// A word remembers its last write, and the last read of each warp. So a race with an earlier lane of a warp can be missed.
// Source: Flanagan and Freund, FastTrack (2009).
#pragma once
#include <algorithm>
#include <vector>

using Clock = std::vector<unsigned>;  // a step for each thread

inline void join(Clock& clock, const Clock& other) {
    clock.resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

struct Access {
    int thread = -1;
    unsigned step = 0;

    // Return whether this access happened before the present of `thread`, whose clock is given. An empty one did.
    bool before(int other, const Clock& clock) const { return thread < 0 || thread == other || step <= clock[thread]; }
};

struct Word {
    Access write;
    int copied_by = -1;  // the thread whose copy is in flight
    std::vector<Access> reads;
};

class Races {
   public:
    std::vector<Clock> clocks;

    Races(int threads, int bytes) : clocks(threads, Clock(threads, 0)), words(bytes / 4 + 1, Word{{}, -1, {}}) {
        for (int i = 0; i < threads; ++i) clocks[i][i] = 1;
        for (Word& word : words) word.reads.resize(threads / 32);
    }

    // The functions below return null, or a fault. `offset` counts bytes from the start of shared memory.
    const char* read(int thread, unsigned offset, int bytes) {
        for (Word* word = first(offset); word != last(offset, bytes); ++word) {
            if (word->copied_by >= 0) return "reads a copy in flight";
            if (!word->write.before(thread, clocks[thread])) return "reads what another thread wrote, without a barrier between";
            word->reads[thread / 32] = {thread, clocks[thread][thread]};
        }
        return nullptr;
    }

    const char* write(int thread, unsigned offset, int bytes) {
        for (Word* word = first(offset); word != last(offset, bytes); ++word) {
            if (const char* fault = overwrites(thread, *word)) return fault;
            word->write = {thread, clocks[thread][thread]};
        }
        return nullptr;
    }

    const char* begin_copy(int thread, unsigned offset, int bytes) {
        for (Word* word = first(offset); word != last(offset, bytes); ++word) {
            if (const char* fault = overwrites(thread, *word)) return fault;
            word->copied_by = thread;
        }
        return nullptr;
    }

    void end_copy(int thread, unsigned offset, int bytes) {
        for (Word* word = first(offset); word != last(offset, bytes); ++word) {
            word->copied_by = -1;
            word->write = {thread, clocks[thread][thread]};
        }
    }

   private:
    std::vector<Word> words;

    Word* first(unsigned offset) { return &words[offset / 4]; }
    Word* last(unsigned offset, int bytes) { return &words[(offset + bytes - 1) / 4] + 1; }

    const char* overwrites(int thread, const Word& word) const {
        if (word.copied_by >= 0) return "overwrites a copy in flight";
        if (!word.write.before(thread, clocks[thread])) return "overwrites what another thread wrote, without a barrier between";
        for (const Access& read : word.reads)
            if (!read.before(thread, clocks[thread])) return "overwrites what another thread reads, without a barrier between";
        return nullptr;
    }
};
