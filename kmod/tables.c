// SPDX-License-Identifier: GPL-2.0
/*
 * Second-stage page tables (AMD64 Architecture Programmer's Manual, volume 2,
 * 15.25): from where the guest sees its memory to where that is. As large
 * pages as the memory allows.
 */
#include <linux/io.h>
#include <linux/mm.h>

#include "vm.h"

#define LEVELS		4
#define ENTRY_BITS	9

#define PRESENT		BIT_ULL(0)
#define WRITABLE	BIT_ULL(1)
/* Not cached, whatever the guest says (PWT and PCD; 15.25.8). */
#define UNCACHED	(BIT_ULL(3) | BIT_ULL(4))
/* The guest's kernel is user space for the second stage. */
#define USER		BIT_ULL(2)
#define ACCESSED	BIT_ULL(5)
#define DIRTY		BIT_ULL(6)
#define LARGE		BIT_ULL(7)
#define ADDRESS		GENMASK_ULL(51, PAGE_SHIFT)

/* Pages of an entry of the level, of which 0 is the lowest. */
static unsigned long pages_at(unsigned int level)
{
	return 1UL << (ENTRY_BITS * level);
}

static u64 *new_table(struct basalt_tables *tables)
{
	struct page *page = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);

	if (!page)
		return NULL;
	list_add(&page->lru, &tables->pages);
	return page_address(page);
}

/**
 * basalt_tables_init() - a table that maps nothing
 * @tables: where
 *
 * Return: 0 or -ENOMEM.
 */
int basalt_tables_init(struct basalt_tables *tables)
{
	INIT_LIST_HEAD(&tables->pages);
	tables->root = new_table(tables);
	return tables->root ? 0 : -ENOMEM;
}

/**
 * basalt_tables_free() - gives all of it back; no CPU uses it any more
 * @tables: which
 */
void basalt_tables_free(struct basalt_tables *tables)
{
	struct page *page, *next;

	list_for_each_entry_safe(page, next, &tables->pages, lru) {
		list_del(&page->lru);
		__free_page(page);
	}
	tables->root = NULL;
}

/* The entry of @level for an address, with all tables above it. */
static u64 *entry_for(struct basalt_tables *tables, u64 guest, unsigned int level)
{
	u64 *table = tables->root;
	unsigned int at = LEVELS - 1;

	for (;;) {
		u64 *entry = &table[(guest >> (PAGE_SHIFT + ENTRY_BITS * at)) & (PTRS_PER_PTE - 1)];

		if (at == level)
			return entry;
		if (!*entry) {
			u64 *below = new_table(tables);

			if (!below)
				return NULL;
			/* A CPU may look at it at any time, and then finds zeroes below. */
			smp_store_release(entry, __pa(below) | PRESENT | WRITABLE | USER | ACCESSED);
		}
		table = __va(*entry & ADDRESS);
		at--;
	}
}

/* The lowest entry for an address, if there are tables for it. */
static u64 *existing_entry(struct basalt_tables *tables, u64 guest)
{
	u64 *table = tables->root;
	unsigned int at;

	for (at = LEVELS - 1; at; at--) {
		u64 entry = table[(guest >> (PAGE_SHIFT + ENTRY_BITS * at)) & (PTRS_PER_PTE - 1)];

		if (!entry || entry & LARGE)
			return NULL;
		table = __va(entry & ADDRESS);
	}
	return &table[(guest >> PAGE_SHIFT) & (PTRS_PER_PTE - 1)];
}

/* Whether so many pages from here are one piece, which one entry can map. */
static bool is_piece(u64 guest, struct page **pages, unsigned long left, unsigned int level)
{
	unsigned long count = pages_at(level), first = page_to_pfn(pages[0]), index;

	if (left < count || !IS_ALIGNED(guest >> PAGE_SHIFT, count) || !IS_ALIGNED(first, count))
		return false;
	/* The last one first: most that are none are found out by it. */
	for (index = count - 1; index; index--) {
		if (page_to_pfn(pages[index]) != first + index)
			return false;
	}
	return true;
}

/**
 * basalt_tables_map() - maps pages where nothing is mapped yet
 * @tables: in which
 * @guest: where the guest sees the first one
 * @pages: they
 * @count: how many
 * @write: whether the guest may write to them
 *
 * Return: 0 or -ENOMEM, with some of them mapped.
 */
int basalt_tables_map(struct basalt_tables *tables, u64 guest, struct page **pages, unsigned long count, bool write)
{
	unsigned int largest = boot_cpu_has(X86_FEATURE_GBPAGES) ? 2 : 1;

	while (count) {
		unsigned int level = largest;
		u64 *entry;

		while (level && !is_piece(guest, pages, count, level))
			level--;
		entry = entry_for(tables, guest, level);
		if (!entry)
			return -ENOMEM;
		WRITE_ONCE(*entry, page_to_phys(pages[0]) | PRESENT | USER | ACCESSED | DIRTY |
				   (write ? WRITABLE : 0) | (level ? LARGE : 0));
		guest += pages_at(level) << PAGE_SHIFT;
		pages += pages_at(level);
		count -= pages_at(level);
		cond_resched();
	}
	return 0;
}

/**
 * basalt_tables_prepare() - makes all tables that single pages need, where nothing is mapped
 * @tables: in which
 * @guest: where the guest sees the first page
 * @count: how many
 *
 * Return: 0 or -ENOMEM, with some of them made.
 */
int basalt_tables_prepare(struct basalt_tables *tables, u64 guest, unsigned long count)
{
	unsigned long index;

	for (index = 0; index < count; index++) {
		if (!entry_for(tables, guest + (index << PAGE_SHIFT), 0))
			return -ENOMEM;
	}
	return 0;
}

/**
 * basalt_tables_map_device() - maps a device's pages where basalt_tables_prepare() was
 * @tables: in which
 * @guest: where the guest sees the first one
 * @pages: their numbers
 * @count: how many
 */
void basalt_tables_map_device(struct basalt_tables *tables, u64 guest, const unsigned long *pages, unsigned long count)
{
	unsigned long index;

	for (index = 0; index < count; index++) {
		u64 *entry = entry_for(tables, guest + (index << PAGE_SHIFT), 0);

		/* A CPU may look at it at any time. */
		WRITE_ONCE(*entry, PFN_PHYS(pages[index]) | PRESENT | WRITABLE | USER | ACCESSED | DIRTY | UNCACHED);
	}
}

/**
 * basalt_tables_unmap() - the same, undone; CPUs may remember
 * @tables: in which
 * @guest: where the guest saw the first one
 * @count: how many
 *
 * Return: whether anything was mapped there.
 */
bool basalt_tables_unmap(struct basalt_tables *tables, u64 guest, unsigned long count)
{
	unsigned long index;
	bool some = false;

	for (index = 0; index < count; index++) {
		u64 *entry = existing_entry(tables, guest + (index << PAGE_SHIFT));

		if (!entry || !*entry)
			continue;
		WRITE_ONCE(*entry, 0);
		some = true;
	}
	return some;
}
