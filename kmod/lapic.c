// SPDX-License-Identifier: GPL-2.0
/*
 * A guest's local APIC, which is the CPU's own, in x2APIC mode: emptied for
 * the next one, read, and made what another was (AMD64 Architecture
 * Programmer's Manual, volume 2, chapter 16). On a CPU that Linux believes to
 * be dead: the same holds as in parked.c. Whatever is written there may not
 * fault, so bits that a register has not are left out.
 */
#include <asm/apicdef.h>
#include <asm/irq_vectors.h>
#include <asm/msr.h>

#include "vm.h"

#define X2APIC(register)	(APIC_BASE_MSR + ((register) >> 4))
#define NUMBER(register)	((register) >> 4)

/* Interrupts of all vectors at most, in service and waiting (16.6.3). */
#define MOST_PENDING	512

/* One bit for each vector, in words of 32. */
#define VECTOR_WORDS	8

/* Vectors of the same priority wait for each other (16.6.4). */
#define PRIORITY_BITS	16

/* Vectors below are exceptions'. */
#define FIRST_INTERRUPT	32

/* What there is in the registers of local vectors (16.4): of pins, of the counters, of errors, and of the timer. */
#define PIN_BITS	(APIC_LVT_MASKED | APIC_LVT_LEVEL_TRIGGER | APIC_INPUT_POLARITY | COUNTER_BITS)
#define COUNTER_BITS	(APIC_LVT_MASKED | APIC_MODES | APIC_VECTOR_MASK)
#define ERROR_BITS	(APIC_LVT_MASKED | APIC_VECTOR_MASK)
#define APIC_MODES	0x700
#define TIMER_BITS	(APIC_LVT_TIMER_PERIODIC | APIC_LVT_MASKED | APIC_VECTOR_MASK)
#define TIMER_MODES	(3 << 17)
#define SPIV_BITS	(APIC_SPIV_APIC_ENABLED | APIC_VECTOR_MASK)
#define DIVIDE_BITS	0xb

/* Read-only, of a local vector: an interrupt is on its way (16.4). */
#define DELIVERS	BIT(12)

/* How often a CPU looks for an interrupt that it has sent itself. */
#define ARRIVES		1000

/* How long the timer is looked at, and how often, as an emulated CPU may be held up between two looks. */
#define LOOK_US		20
#define LOOKS		8

static __always_inline u32 read(u32 reg)
{
	return (u32)__rdmsr(X2APIC(reg));
}

static __always_inline void write(u32 reg, u32 value)
{
	__wrmsr(X2APIC(reg), value, 0);
}

/* By the CPU to itself; it waits until the CPU takes it. */
static __always_inline void raise(u8 vector)
{
	__wrmsr(X2APIC(APIC_SELF_IPI), vector, 0);
}

/**
 * basalt_lapic_drain() - takes and forgets whatever is in the APIC, and switches it off
 *
 * What the host has left there would reach the guest, and what a guest has
 * left the host.
 */
void notrace basalt_lapic_drain(void)
{
	unsigned int tries, word;
	u32 pending;

	write(APIC_LVTT, APIC_LVT_MASKED);
	write(APIC_LVTPC, APIC_LVT_MASKED);
	write(APIC_LVT0, APIC_LVT_MASKED);
	write(APIC_LVT1, APIC_LVT_MASKED);
	write(APIC_LVTERR, APIC_LVT_MASKED);
	write(APIC_TMICT, 0);
	write(APIC_TASKPRI, 0);
	write(APIC_SPIV, APIC_SPIV_APIC_ENABLED | SPURIOUS_APIC_VECTOR);
	for (tries = 0; tries < MOST_PENDING; tries++) {
		pending = 0;
		for (word = 0; word < VECTOR_WORDS; word++)
			pending |= read(APIC_IRR + 0x10 * word) | read(APIC_ISR + 0x10 * word);
		if (!pending)
			break;
		basalt_take_interrupt();
		write(APIC_EOI, 0);
	}
	write(APIC_SPIV, SPURIOUS_APIC_VECTOR);
}

/**
 * basalt_lapic_timer_khz() - how fast the timer counts, before it is divided
 * @tsc_khz: how fast the TSC does
 *
 * For an APIC that nobody uses: its timer stands afterwards.
 *
 * Return: that, in kHz; 0 if it does not count.
 */
u32 notrace basalt_lapic_timer_khz(u32 tsc_khz)
{
	u64 window = (u64)tsc_khz * LOOK_US / 1000, closest = U64_MAX;
	unsigned int look;
	u32 khz = 0;

	write(APIC_SPIV, APIC_SPIV_APIC_ENABLED | SPURIOUS_APIC_VECTOR);
	write(APIC_TDCR, APIC_TDR_DIV_1);
	write(APIC_LVTT, APIC_LVT_MASKED);
	for (look = 0; look < LOOKS; look++) {
		u64 before = rdtsc_ordered(), began, ended, after, unsure;
		u32 left;

		write(APIC_TMICT, U32_MAX);
		began = rdtsc_ordered();
		do {
			ended = rdtsc_ordered();
		} while (ended - began < window);
		left = read(APIC_TMCCT);
		after = rdtsc_ordered();
		/* It began somewhere between the first two, and was read between the others: the closer they are, the better. */
		unsure = began - before + after - ended;
		if (unsure >= closest || ended == began)
			continue;
		closest = unsure;
		khz = (u64)(U32_MAX - left) * tsc_khz / (ended - began + unsure / 2);
	}
	write(APIC_TMICT, 0);
	write(APIC_SPIV, SPURIOUS_APIC_VECTOR);
	return khz;
}

static __always_inline bool is_local_vector(u32 reg)
{
	return reg >= APIC_LVTT && reg <= APIC_LVTERR;
}

/**
 * basalt_lapic_save() - reads the APIC of a guest that does not run
 * @vcpu: whose; into its context, whose registers are zeroes
 */
void notrace basalt_lapic_save(struct basalt_vcpu *vcpu)
{
	static const u16 plain[] = {
		APIC_LVR, APIC_TASKPRI, APIC_SPIV, APIC_LVTT, APIC_LVTPC, APIC_LVT0, APIC_LVT1, APIC_LVTERR,
		APIC_TMICT, APIC_TDCR,
	};
	u32 *to = vcpu->context->apic;
	unsigned int index;

	to[NUMBER(APIC_ID)] = vcpu->apic_id;
	to[NUMBER(APIC_LDR)] = basalt_logical_id(vcpu->apic_id);
	/* Before what it raises: it may do so in between, and twice is better than never. */
	to[NUMBER(APIC_TMCCT)] = read(APIC_TMCCT);
	for (index = 0; index < ARRAY_SIZE(plain); index++)
		to[NUMBER(plain[index])] = read(plain[index]) & ~(is_local_vector(plain[index]) ? DELIVERS : 0);
	for (index = 0; index < VECTOR_WORDS; index++) {
		to[NUMBER(APIC_ISR) + index] = read(APIC_ISR + 0x10 * index);
		to[NUMBER(APIC_IRR) + index] = read(APIC_IRR + 0x10 * index);
	}
	vcpu->context->timer_khz = vcpu->timer_khz;
}

static __always_inline bool has(const u32 *registers, u32 first, unsigned int vector)
{
	return registers[NUMBER(first) + vector / 32] & BIT(vector % 32);
}

/**
 * basalt_lapic_bears() - whether an APIC can become so
 * @context: what is asked for
 *
 * Return: that. Two vectors of one priority are never in service at once, and
 * exceptions' never; there is no timer that waits for a time (16.4.1).
 */
bool basalt_lapic_bears(const struct basalt_context *context)
{
	unsigned int vector, priority;

	for (priority = 0; priority < VECTOR_WORDS * 32; priority += PRIORITY_BITS) {
		unsigned int served = 0;

		for (vector = priority; vector < priority + PRIORITY_BITS; vector++) {
			served += has(context->apic, APIC_ISR, vector);
			if (vector < FIRST_INTERRUPT &&
			    (has(context->apic, APIC_ISR, vector) || has(context->apic, APIC_IRR, vector)))
				return false;
		}
		if (served > 1)
			return false;
	}
	return (context->apic[NUMBER(APIC_LVTT)] & TIMER_MODES & ~APIC_LVT_TIMER_PERIODIC) == 0;
}

/* Taken and not ended, an interrupt is in service. */
static void notrace serve(u8 vector)
{
	unsigned int tries;

	raise(vector);
	for (tries = 0; tries < ARRIVES && !(read(APIC_ISR + 0x10 * (vector / 32)) & BIT(vector % 32)); tries++)
		basalt_take_interrupt();
}

/**
 * basalt_lapic_load() - makes the APIC what the context of a vCPU says
 * @vcpu: whose; basalt_lapic_bears() its context, and it does not run
 */
void notrace basalt_lapic_load(struct basalt_vcpu *vcpu)
{
	const u32 *from = vcpu->context->apic;
	u32 timer = from[NUMBER(APIC_LVTT)] & TIMER_BITS;
	unsigned int vector;

	basalt_lapic_drain();
	write(APIC_SPIV, APIC_SPIV_APIC_ENABLED | SPURIOUS_APIC_VECTOR);
	/* The next of them has the higher priority. */
	for (vector = FIRST_INTERRUPT; vector < VECTOR_WORDS * 32; vector++) {
		if (has(from, APIC_ISR, vector))
			serve(vector);
	}
	for (vector = FIRST_INTERRUPT; vector < VECTOR_WORDS * 32; vector++) {
		if (has(from, APIC_IRR, vector))
			raise(vector);
	}
	write(APIC_LVTPC, from[NUMBER(APIC_LVTPC)] & COUNTER_BITS);
	write(APIC_LVT0, from[NUMBER(APIC_LVT0)] & PIN_BITS);
	write(APIC_LVT1, from[NUMBER(APIC_LVT1)] & PIN_BITS);
	write(APIC_LVTERR, from[NUMBER(APIC_LVTERR)] & ERROR_BITS);
	/* The timer stands while it becomes another. */
	write(APIC_TDCR, from[NUMBER(APIC_TDCR)] & DIVIDE_BITS);
	write(APIC_LVTT, timer);
	write(APIC_TMICT, from[NUMBER(timer & APIC_LVT_TIMER_PERIODIC ? APIC_TMICT : APIC_TMCCT)]);
	write(APIC_TASKPRI, from[NUMBER(APIC_TASKPRI)] & APIC_TPRI_MASK);
	write(APIC_SPIV, from[NUMBER(APIC_SPIV)] & SPIV_BITS);
}
