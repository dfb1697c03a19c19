// SPDX-License-Identifier: GPL-2.0
/*
 * Memory for guests whose addresses nobody translates: physical ranges that
 * Linux was told not to use when it was booted (memmap=SIZE$START), and that
 * the module is told of when it is loaded. Nothing of Linux's knows them: there
 * need be no struct page. All of it is write-back, for whoever accesses it.
 *
 * Each such guest gets a piece of one of the ranges, and one below 1 MiB, from
 * where processors start: those are in the range "low".
 */
#include <linux/io.h>
#include <linux/ioport.h>
#include <linux/kernel.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/overflow.h>
#include <linux/sched/signal.h>
#include <linux/sizes.h>

#include "vm.h"

static char *memory;
module_param(memory, charp, 0400);
MODULE_PARM_DESC(memory, "memory for guests whose addresses are not translated: SIZE@START[,SIZE@START...], each kept from Linux by memmap=SIZE$START on its command line");

static char *low;
module_param(low, charp, 0400);
MODULE_PARM_DESC(low, "and some of it below 1 MiB, 32K for each guest: SIZE@START");

/* Ranges of "memory". */
#define MOST_RANGES	8

/* As much as is mapped at once, to be looked at or zeroed. */
#define AT_ONCE		SZ_2M

/**
 * struct reserve - memory that Linux does not have
 * @start: its first address
 * @size: bytes
 * @region: by which others are kept from it, or NULL
 * @pieces: of it that are somebody's, by addresses
 */
struct reserve {
	u64 start;
	u64 size;
	struct resource *region;
	struct list_head pieces;
};

static struct reserve ranges[MOST_RANGES], low_range;
static unsigned int range_count;

/* For the pieces of all ranges. */
static DEFINE_MUTEX(pool);

/* What a range's first address is a multiple of, and its size. */
static u64 unit_of(const struct reserve *range)
{
	return range == &low_range ? PAGE_SIZE : BASALT_PIECE;
}

/* As SIZE@START; tells where that ends. */
static const char *parse(const char *text, struct reserve *range)
{
	char *end;

	range->size = memparse(text, &end);
	if (end == text || *end != '@')
		return NULL;
	text = end + 1;
	range->start = memparse(text, &end);
	return end == text ? NULL : end;
}

/* What is wrong with where it is, or NULL. */
static const char *misplaced(const struct reserve *range)
{
	u64 end;

	if (!range->size || (range->start | range->size) % unit_of(range))
		return range == &low_range ? "is not whole pages" : "is not a multiple of 2M at a multiple of 2M";
	if (check_add_overflow(range->start, range->size, &end) || end > BIT_ULL(boot_cpu_data.x86_phys_bits))
		return "is beyond what this processor can address";
	if (range == &low_range ? end > SZ_1M : range->start < SZ_1M)
		return range == &low_range ? "is not below 1M" : "is below 1M: name that by the parameter low";
	if (range == &low_range && range->size < BASALT_LOW_PIECE)
		return "is less than the 32K that each guest needs";
	return NULL;
}

/* What is wrong with whose it is, or NULL. */
static const char *not_ours(const struct reserve *range)
{
	if (region_intersects(range->start, range->size, IORESOURCE_SYSTEM_RAM, IORES_DESC_NONE) != REGION_DISJOINT)
		return "is Linux's memory: boot the host with memmap=SIZE$START for it";
	if (region_intersects(range->start, range->size, IORESOURCE_MEM, IORES_DESC_RESERVED) != REGION_INTERSECTS)
		return "is not reserved, or something else is there: boot the host with memmap=SIZE$START for it, and see /proc/iomem";
	return NULL;
}

/* Does something with each part of a range in turn. */
static int for_each_part(u64 start, u64 size, bool (*work)(u64 address, u64 *part, u64 size))
{
	u64 at;

	for (at = start; at < start + size; at += AT_ONCE) {
		u64 bytes = min_t(u64, AT_ONCE, start + size - at);
		u64 *part = memremap(at, bytes, MEMREMAP_WB);
		bool good;

		if (!part)
			return -ENOMEM;
		good = work(at, part, bytes);
		memunmap(part);
		if (!good)
			return -EIO;
		if (fatal_signal_pending(current))
			return -EINTR;
		cond_resched();
	}
	return 0;
}

/* What no bus and no other part of the range has by chance. */
static u64 pattern(u64 address)
{
	return address ^ 0x6261736c74a55a3cULL;
}

static bool write_pattern(u64 address, u64 *part, u64 size)
{
	WRITE_ONCE(part[0], pattern(address));
	WRITE_ONCE(part[size / sizeof(*part) - 1], ~pattern(address));
	return true;
}

static bool read_pattern(u64 address, u64 *part, u64 size)
{
	return READ_ONCE(part[0]) == pattern(address) && READ_ONCE(part[size / sizeof(*part) - 1]) == ~pattern(address);
}

static bool zero(u64 address, u64 *part, u64 size)
{
	memset(part, 0, size);
	return true;
}

/* Everything is written before anything is read: two places that are one show. What is written is read from memory, not a cache. */
static const char *no_memory(const struct reserve *range)
{
	int error;

	error = for_each_part(range->start, range->size, write_pattern);
	wbinvd_on_all_cpus();
	if (!error)
		error = for_each_part(range->start, range->size, read_pattern);
	if (error == -ENOMEM)
		return "cannot be mapped by the kernel";
	return error ? "does not keep what is written there: there is no memory" : NULL;
}

static int add(const char *name, struct reserve *range)
{
	const char *wrong = misplaced(range);

	INIT_LIST_HEAD(&range->pieces);
	if (!wrong)
		wrong = not_ours(range);
	/* What is below is marked as taken by Linux whoever has it. */
	if (!wrong && range != &low_range) {
		range->region = request_mem_region(range->start, range->size, "basalt");
		if (!range->region)
			wrong = "is used by somebody else, or named twice: see /proc/iomem";
	}
	if (!wrong)
		wrong = no_memory(range);
	if (!wrong)
		return 0;
	pr_err(BASALT "%s=%lluK@%#llx %s\n", name, range->size >> 10, range->start, wrong);
	return -EINVAL;
}

static int add_all(void)
{
	const char *at = memory;

	for (;;) {
		if (range_count == MOST_RANGES) {
			pr_err(BASALT "memory=%s names more than %u ranges\n", memory, MOST_RANGES);
			return -EINVAL;
		}
		at = parse(at, &ranges[range_count]);
		if (!at || (*at && *at != ',')) {
			pr_err(BASALT "memory=%s is not SIZE@START[,SIZE@START...], such as 512M@0x100000000\n", memory);
			return -EINVAL;
		}
		/* One that fails is given back with the others. */
		if (add("memory", &ranges[range_count++]))
			return -EINVAL;
		if (!*at++)
			return 0;
	}
}

/**
 * basalt_pool_init() - looks at the memory that the module was told of
 *
 * Return: 0, also where that is none; -EINVAL where it cannot be used, and the
 * kernel's log says why.
 */
int basalt_pool_init(void)
{
	const char *end;
	int error;

	if (!memory && !low)
		return 0;
	if (!memory || !low) {
		pr_err(BASALT "memory= and low= are given together: guests need both\n");
		return -EINVAL;
	}
	error = add_all();
	if (error)
		goto failed;
	end = parse(low, &low_range);
	if (!end || *end) {
		pr_err(BASALT "low=%s is not SIZE@START, such as 64K@0x20000\n", low);
		error = -EINVAL;
	} else {
		error = add("low", &low_range);
	}
	if (!error)
		return 0;
failed:
	basalt_pool_exit();
	return error;
}

/**
 * basalt_pool_exit() - forgets it; nobody has any of it
 */
void basalt_pool_exit(void)
{
	while (range_count) {
		struct reserve *range = &ranges[--range_count];

		if (range->region)
			release_mem_region(range->start, range->size);
	}
}

/* What is free between one piece and the next, or the end; moves @at behind that. */
static u64 gap(const struct reserve *range, const struct list_head *next, u64 *at)
{
	u64 start = *at;

	if (next == &range->pieces)
		return range->start + range->size - start;
	*at = list_entry(next, struct basalt_piece, list)->start + list_entry(next, struct basalt_piece, list)->size;
	return list_entry(next, struct basalt_piece, list)->start - start;
}

static u64 largest(const struct reserve *range)
{
	const struct list_head *next = &range->pieces;
	u64 at = range->start, most = 0;

	do {
		next = next->next;
		most = max(most, gap(range, next, &at));
	} while (next != &range->pieces);
	return most;
}

/* The first place where it fits. */
static bool take(struct reserve *range, u64 size, struct basalt_piece *piece)
{
	struct list_head *next = &range->pieces;
	u64 at = range->start;

	do {
		u64 start = at;

		next = next->next;
		if (gap(range, next, &at) >= size) {
			piece->start = start;
			piece->size = size;
			list_add_tail(&piece->list, next);
			return true;
		}
	} while (next != &range->pieces);
	return false;
}

/**
 * basalt_pool_tell() - how much memory there is
 * @total: where the bytes of all ranges are written
 * @free: and the most that basalt_pool_take() has now
 */
void basalt_pool_tell(u64 *total, u64 *free)
{
	unsigned int index;

	*total = 0;
	*free = 0;
	mutex_lock(&pool);
	for (index = 0; index < range_count; index++) {
		*total += ranges[index].size;
		*free = max(*free, largest(&ranges[index]));
	}
	if (range_count && largest(&low_range) < BASALT_LOW_PIECE)
		*free = 0;
	mutex_unlock(&pool);
}

/**
 * basalt_pool_take() - memory for a guest, zeroes
 * @size: bytes, a multiple of BASALT_PIECE
 * @main: what is written about that
 * @low: and about the BASALT_LOW_PIECE bytes below 1 MiB
 *
 * Return: 0; -ENODEV where there is no such memory at all; -ENOSPC where less
 * is free; -ENOMEM or -EINTR. Whatever is returned, both can be given back.
 */
int basalt_pool_take(u64 size, struct basalt_piece *main, struct basalt_piece *low)
{
	unsigned int index;
	bool taken = false;
	int error;

	if (!range_count)
		return -ENODEV;
	mutex_lock(&pool);
	for (index = 0; index < range_count && !taken; index++)
		taken = take(&ranges[index], size, main);
	taken = taken && take(&low_range, BASALT_LOW_PIECE, low);
	mutex_unlock(&pool);
	if (!taken)
		return -ENOSPC;
	error = for_each_part(main->start, main->size, zero);
	return error ? error : for_each_part(low->start, low->size, zero);
}

/**
 * basalt_pool_give() - gives a piece back
 * @piece: which; nobody uses it any more. One that was never taken is zeroes
 */
void basalt_pool_give(struct basalt_piece *piece)
{
	if (!piece->size)
		return;
	mutex_lock(&pool);
	list_del(&piece->list);
	mutex_unlock(&pool);
	piece->size = 0;
}
