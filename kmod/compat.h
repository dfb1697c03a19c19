/* SPDX-License-Identifier: GPL-2.0 */
/* What is another in one kernel than in the next: nothing else knows of versions. */
#ifndef _BASALT_COMPAT_H
#define _BASALT_COMPAT_H

#include <linux/kprobes.h>
#include <linux/version.h>
#include <asm/apic.h>
#include <asm/smp.h>

/*
 * The address of a function that is not exported. Where a probe could be set
 * is found out first, and told even where none may be.
 */
static inline unsigned long basalt_address_of(const char *name)
{
	struct kprobe probe = { .symbol_name = name };

	if (!register_kprobe(&probe))
		unregister_kprobe(&probe);
	return (unsigned long)probe.addr;
}

/* An NMI for one CPU, whether Linux believes it to be alive or not. */
static inline void basalt_send_nmi(unsigned int cpu)
{
	apic->icr_write(APIC_DM_NMI, per_cpu(x86_cpu_to_apicid, cpu));
}

/* An interrupt for one CPU, by its vector there. */
static inline void basalt_send_fixed(unsigned int cpu, u8 vector)
{
	apic->icr_write(APIC_DM_FIXED | vector, per_cpu(x86_cpu_to_apicid, cpu));
}

#endif
