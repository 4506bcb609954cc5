/*
 * What a warp does together: each lane posts what it brings and waits; the last one computes the answers of
 * all. And each lane's copies to shared memory, which land when they are waited for.
 */
#include "tests/simt/internal.h"

static const char shuffle_name[] = "a shuffle", ballot_name[] = "a vote", sync_name[] = "__syncwarp";
static const char mma_name[] = "fs_mma_16x8x16", mma_bf16_name[] = "fs_mma_16x8x16_bf16";
static const char ldmatrix_name[] = "fs_ldmatrix_x4", ldmatrix_trans_name[] = "fs_ldmatrix_x4_trans";

/* The lanes of the warp of t. */
static simt_thread **lanes_of(simt_thread *t)
{
	int at = (int)(t->place.thread.x +
	               t->place.block_dim.x * (t->place.thread.y + t->place.block_dim.y * t->place.thread.z));

	return &simt_m.threads[(size_t)(at - t->place.lane)];
}

static bool all_there(simt_thread *t, unsigned int mask, const char *what)
{
	simt_thread **lane = lanes_of(t);
	ptrdiff_t count = simt_m.n - (lane - &simt_m.threads[0]);

	if (!(mask >> t->place.lane & 1))
		simt_fail("%s with lanes %08x, which lack its own, %d", what, mask, t->place.lane);
	for (int i = 0; i < 32; i++) {
		if (!(mask >> i & 1) || i == t->place.lane)
			continue;
		if (i >= count)
			simt_fail("%s waits for lane %d, which the block does not have", what, i);
		if (lane[i]->state == SIMT_DONE)
			simt_fail("%s waits for lane %d, which has ended", what, i);
		if (lane[i]->state != SIMT_AT_WARP)
			return false;
		if (lane[i]->what != what || lane[i]->mask != mask)
			simt_fail("%s with lanes %08x, where lane %d is at %s with lanes %08x", what, mask, i,
			        lane[i]->what, lane[i]->mask);
	}
	return true;
}

/* complete answers for all lanes of the mask. */
static void together(
        unsigned int mask, const char *what, void (*complete)(simt_thread **lane, unsigned int mask))
{
	simt_thread *t = simt_thread_now();
	simt_thread **lane = lanes_of(t);
	char *at = &lane[0]->warp.at[lane[0]->warp.turn & 1];

	simt_order_release(at);
	t->mask = mask;
	if (!all_there(t, mask, what)) {
		simt_wait(t, SIMT_AT_WARP, what);
	} else {
		if (complete)
			complete(lane, mask);
		lane[0]->warp.turn++;
		for (int i = 0; i < 32; i++)
			if (mask >> i & 1)
				lane[i]->state = SIMT_READY;
	}
	simt_order_acquire(at);
}

void __syncwarp(unsigned int mask)
{
	together(mask, sync_name, NULL);
}

static void complete_shuffle(simt_thread **lane, unsigned int mask)
{
	uint64_t got[32] = {0};

	for (int i = 0; i < 32; i++) {
		if (!(mask >> i & 1))
			continue;
		if (lane[i]->from < 0 || lane[i]->from > 31 || !(mask >> lane[i]->from & 1))
			simt_fail("a shuffle: lane %d asks for lane %d, which is not among %08x", i,
			        lane[i]->from, mask);
		got[i] = lane[lane[i]->from]->bits;
	}
	for (int i = 0; i < 32; i++)
		if (mask >> i & 1)
			lane[i]->bits = got[i];
}

uint64_t simt_shuffle(unsigned int mask, uint64_t bits, int from, const char *name)
{
	simt_thread *t = simt_thread_now();

	t->bits = bits;
	t->from = from;
	together(mask, shuffle_name, complete_shuffle);
	return t->bits;
}

static void complete_ballot(simt_thread **lane, unsigned int mask)
{
	unsigned int all = 0;

	for (int i = 0; i < 32; i++)
		if (mask >> i & 1)
			all |= (unsigned int)lane[i]->bits << i;
	for (int i = 0; i < 32; i++)
		if (mask >> i & 1)
			lane[i]->bits = all;
}

unsigned int simt_ballot(unsigned int mask, bool v)
{
	simt_thread *t = simt_thread_now();

	t->bits = v;
	together(mask, ballot_name, complete_ballot);
	return (unsigned int)t->bits;
}

/* ---- tensor cores ---- */

static float number(uint32_t pair, int high, bool bf16)
{
	uint16_t bits = (uint16_t)(high ? pair >> 16 : pair);

	return bf16 ? fs_b2f(bits) : fs_h2f(bits);
}

/* Fragments by the tables of the PTX manual, mma.m16n8k16; sums in double, rounded once. */
static void multiply(simt_thread **lane, bool bf16)
{
	float a[16][16], b[16][8];

	for (int l = 0; l < 32; l++) {
		int g = l / 4, t = l % 4;

		for (int i = 0; i < 8; i++)
			a[i / 2 % 2 ? g + 8 : g][2 * t + i % 2 + (i < 4 ? 0 : 8)] =
			        number(lane[l]->a[i / 2], i % 2, bf16);
		for (int i = 0; i < 4; i++)
			b[2 * t + i % 2 + (i < 2 ? 0 : 8)][g] = number(lane[l]->b[i / 2], i % 2, bf16);
	}
	for (int l = 0; l < 32; l++) {
		int g = l / 4, t = l % 4;

		for (int i = 0; i < 4; i++) {
			int row = i < 2 ? g : g + 8, col = 2 * t + i % 2;
			double sum = (double)lane[l]->c[i];

			for (int k = 0; k < 16; k++)
				sum += (double)a[row][k] * (double)b[k][col];
			lane[l]->c[i] = (float)sum;
		}
	}
}

static void complete_mma(simt_thread **lane, unsigned int mask)
{
	multiply(lane, false);
}

static void complete_mma_bf16(simt_thread **lane, unsigned int mask)
{
	multiply(lane, true);
}

void simt_mma(float c[4], const uint32_t a[4], const uint32_t b[2], bool bf16)
{
	simt_thread *t = simt_thread_now();

	t->c = c;
	t->a = a;
	t->b = b;
	together(0xffffffffu, bf16 ? mma_bf16_name : mma_name, bf16 ? complete_mma_bf16 : complete_mma);
}

static void load_matrices(simt_thread **lane, bool trans)
{
	for (int m = 0; m < 4; m++) {
		uint16_t e[8][8];

		for (int r = 0; r < 8; r++) {
			const void *row = lane[8 * m + r]->row;

			if ((uintptr_t)row % 16 != 0)
				simt_fail("ldmatrix: row %d of matrix %d at %p", r, m, row);
			memcpy(e[r], row, 16);
		}
		for (int l = 0; l < 32; l++) {
			int g = l / 4, t = 2 * (l % 4);

			lane[l]->r[m] = trans ? e[t][g] | (uint32_t)e[t + 1][g] << 16
			                      : e[g][t] | (uint32_t)e[g][t + 1] << 16;
		}
	}
}

static void complete_ldmatrix(simt_thread **lane, unsigned int mask)
{
	load_matrices(lane, false);
}

static void complete_ldmatrix_trans(simt_thread **lane, unsigned int mask)
{
	load_matrices(lane, true);
}

void simt_ldmatrix(uint32_t r[4], const void *row, bool trans)
{
	simt_thread *t = simt_thread_now();

	t->r = r;
	t->row = row;
	simt_watch_read(row);
	together(0xffffffffu, trans ? ldmatrix_trans_name : ldmatrix_name,
	        trans ? complete_ldmatrix_trans : complete_ldmatrix);
}

/* ---- copies ---- */

void fs_cp16(void *shared, const void *src, bool fill)
{
	simt_thread *t = simt_thread_now();

	if ((uintptr_t)shared % 16 != 0 || (fill && (uintptr_t)src % 16 != 0))
		simt_fail("fs_cp16 from %p to %p", src, shared);
	simt_watch_write(shared); /* from now on, until it has landed */
	if (fill)
		simt_watch_read(src);
	t->copies.push_back(simt_copy{shared, fill ? src : NULL, t->group});
}

void fs_cp_commit(void)
{
	simt_thread_now()->group++;
}

void simt_copies_land(simt_thread *t, int before)
{
	size_t kept = 0;

	for (const simt_copy &c : t->copies) {
		if (c.group >= before) {
			t->copies[kept++] = c;
			continue;
		}
		simt_watch_write(c.to);
		if (c.from)
			memcpy(c.to, c.from, 16);
		else
			memset(c.to, 0, 16);
	}
	t->copies.resize(kept);
}

void simt_cp_wait(int n)
{
	simt_thread *t = simt_thread_now();

	simt_copies_land(t, t->group - n);
}
