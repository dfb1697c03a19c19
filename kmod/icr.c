// SPDX-License-Identifier: GPL-2.0
/*
 * What a guest writes to its x2APIC's interrupt command register (AMD64
 * Architecture Programmer's Manual, volume 2, 16.5 and 16.13), on a CPU that
 * Linux believes to be dead. The register is the physical CPU's, and what is
 * written there reaches whoever has the id: so interrupts go to vCPUs of this
 * guest and to nobody else, and everything that is no interrupt (NMI, INIT,
 * startup, SMI) goes to user space.
 */
#include <asm/apicdef.h>
#include <asm/msr.h>

#include "vm.h"

#define X2APIC_ICR	(APIC_BASE_MSR + (APIC_ICR >> 4))
#define X2APIC_ALL	U32_MAX
#define APIC_MODES	0x700
#define SHORTHAND	APIC_DEST_ALLBUT
/* Vectors below are illegal (16.3.3). */
#define FIRST_VECTOR	16

static __always_inline bool is_logical(u32 id, u32 destination)
{
	u32 logical = basalt_logical_id(id);

	return logical >> 16 == destination >> 16 && (u16)(logical & destination);
}

static __always_inline bool is_meant(u32 id, u32 self, u32 low, u32 destination)
{
	switch (low & SHORTHAND) {
	case APIC_DEST_SELF:
		return id == self;
	case APIC_DEST_ALLINC:
		return true;
	case APIC_DEST_ALLBUT:
		return id != self;
	}
	if (destination == X2APIC_ALL)
		return true;
	return low & APIC_DEST_LOGICAL ? is_logical(id, destination) : id == destination;
}

/**
 * basalt_icr_write() - sends what the guest sends
 * @vcpu: which
 * @value: what it writes
 *
 * Return: whether anybody has got it, or user space has to do it.
 */
enum basalt_sent notrace basalt_icr_write(struct basalt_vcpu *vcpu, u64 value)
{
	enum basalt_sent sent = BASALT_SENT_NOBODY;
	u32 low = value, destination = value >> 32, mode = low & APIC_MODES, index;
	u8 vector = low & APIC_VECTOR_MASK;

	if (mode != APIC_DM_FIXED && mode != APIC_DM_LOWEST)
		return BASALT_SENT_BY_USER;
	if (vector < FIRST_VECTOR)
		return sent;
	for (index = 0; index < BASALT_MAX_CPUS; index++) {
		const struct basalt_apic *apic = &vcpu->vm->apics[index];
		/* Whose physical id it is was there before it. */
		u32 id = smp_load_acquire(&apic->id);

		if (id == BASALT_NO_APIC || !is_meant(id, vcpu->apic_id, low, destination))
			continue;
		__wrmsr(X2APIC_ICR, APIC_DM_FIXED | vector, READ_ONCE(apic->physical));
		sent = BASALT_SENT;
		if (mode == APIC_DM_LOWEST)
			break;
	}
	return sent;
}
