// SPDX-License-Identifier: GPL-2.0
/*
 * An interrupt table for a moment in which whatever waits in an APIC is taken
 * and forgotten: Linux's own for exceptions and NMIs, and nothing for all
 * interrupts.
 */
#include <asm/desc.h>
#include <asm/irq_vectors.h>

#include "basalt.h"

static gate_desc gates[IDT_ENTRIES] __page_aligned_bss;

/* For enter.S. */
struct desc_ptr basalt_swallow_table = {
	.size = sizeof(gates) - 1,
	.address = (unsigned long)gates,
};

/**
 * basalt_swallow_init() - makes the table, of what this CPU has
 */
void basalt_swallow_init(void)
{
	unsigned long handler = (unsigned long)basalt_swallow;
	struct desc_ptr linux_table;
	unsigned int vector;

	store_idt(&linux_table);
	memcpy(gates, (void *)linux_table.address, sizeof(gates));
	for (vector = FIRST_EXTERNAL_VECTOR; vector < IDT_ENTRIES; vector++) {
		gates[vector] = (struct gate_struct){
			.offset_low = (u16)handler,
			.offset_middle = (u16)(handler >> 16),
			.offset_high = (u32)(handler >> 32),
			.segment = __KERNEL_CS,
			.bits = { .type = GATE_INTERRUPT, .p = 1 },
		};
	}
}
