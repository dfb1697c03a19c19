/* SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR Apache-2.0 */
/*
 * What user space says to basalt.ko: CPUs that Linux gives up, and virtual
 * machines that run on them.
 *
 * Every structure has its size in the request's number; what is reserved must
 * be zero, and unknown flags are refused (-EINVAL), so that both can get a
 * meaning later. A new meaning of anything raises BASALT_API_VERSION.
 */
#ifndef _UAPI_BASALT_H
#define _UAPI_BASALT_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define BASALT_API_VERSION	6

/* Where the requests are made: a character device, for its owner alone. */
#define BASALT_DEVICE		"/dev/basalt"

/* CPUs of one claim. */
#define BASALT_MAX_CPUS		64

/**
 * struct basalt_info - what this module can do
 * @version: BASALT_API_VERSION of the module
 * @vendor: one of BASALT_VENDOR_*: whose virtualization the host's CPUs have
 * @tsc_khz: how fast the host's time stamp counters count
 * @reserved0: zero
 * @memory: bytes that are reserved for machines with BASALT_VM_IDENTITY, but for those below 1 MiB
 * @memory_free: the most that such a machine can have now; zero also where nothing below 1 MiB is left
 * @reserved: zero
 */
struct basalt_info {
	__u32 version;
	__u32 vendor;
	__u32 tsc_khz;
	__u32 reserved0;
	__u64 memory;
	__u64 memory_free;
	__u32 reserved[8];
};

#define BASALT_VENDOR_NONE	0
#define BASALT_VENDOR_AMD	1

/**
 * struct basalt_claim - CPUs that Linux is to give up
 * @flags: none yet: zero
 * @count: how many of @cpus are given
 * @cpus: their numbers, as Linux counts them; each once
 * @failed: on failure the one that could not be had, if it was one of them
 * @reserved: zero
 */
struct basalt_claim {
	__u32 flags;
	__u32 count;
	__u32 cpus[BASALT_MAX_CPUS];
	__u32 failed;
	__u32 reserved[5];
};

/*
 * On BASALT_DEVICE. BASALT_CLAIM returns a descriptor of the claim: its CPUs
 * are Linux's again when the last copy of that is closed, by whomever and
 * however. Errors of it: EINVAL (a number twice, none, too many), ENODEV
 * (there is no such CPU, or it is not online), EBUSY (it is claimed, or Linux
 * cannot do without it), EOPNOTSUPP (this kernel cannot be asked).
 * BASALT_GET_INFO can be asked of a claim as well.
 */
#define BASALT_GET_INFO		_IOR(0xba, 0x00, struct basalt_info)
#define BASALT_CLAIM		_IOWR(0xba, 0x01, struct basalt_claim)

/**
 * struct basalt_claimed - what a claim has
 * @count: how many of @cpus there are
 * @cpus: their numbers, as Linux counts them, in rising order
 * @tsc_khz: as in struct basalt_info
 * @reserved: zero
 */
struct basalt_claimed {
	__u32 count;
	__u32 cpus[BASALT_MAX_CPUS];
	__u32 tsc_khz;
	__u32 reserved[14];
};

/* On a claim: whoever was given its descriptor learns by it what that is of. */
#define BASALT_GET_CLAIMED	_IOR(0xba, 0x02, struct basalt_claimed)

/**
 * struct basalt_create_vm - a virtual machine
 * @flags: BASALT_VM_IDENTITY or none
 * @reserved0: zero
 * @memory: with BASALT_VM_IDENTITY how many bytes, a multiple of BASALT_PIECE; otherwise zero
 * @reserved: zero
 */
struct basalt_create_vm {
	__u32 flags;
	__u32 reserved0;
	__u64 memory;
	__u32 reserved[4];
};

/*
 * The guest's addresses are the host's: nobody translates them, and it can
 * reach whatever there is. It gets memory of its own, out of what was reserved
 * when the module was loaded: zeroes, in one piece, and another below 1 MiB,
 * from where processors start.
 */
#define BASALT_VM_IDENTITY	(1 << 0)

/* What such memory is a multiple of, and how much below 1 MiB each machine gets. */
#define BASALT_PIECE		(2 << 20)
#define BASALT_LOW_PIECE	(32 << 10)

/*
 * On a claim. Returns a descriptor of the machine, which keeps the claim.
 * Errors: EOPNOTSUPP (the CPUs have no virtualization that we know, or the
 * firmware has turned it off); with BASALT_VM_IDENTITY also ENODEV (no memory
 * is reserved) and ENOSPC (less of it is free, in one piece).
 */
#define BASALT_CREATE_VM	_IOW(0xba, 0x10, struct basalt_create_vm)

/**
 * struct basalt_memory - memory of the guest
 * @guest: where the guest sees it; a multiple of 4096
 * @size: bytes; a multiple of 4096
 * @address: where it is in this process, which keeps it; a multiple of 4096
 * @flags: BASALT_MEMORY_READ_ONLY or none
 * @reserved: zero
 */
struct basalt_memory {
	__u64 guest;
	__u64 size;
	__u64 address;
	__u32 flags;
	__u32 reserved[9];
};

#define BASALT_MEMORY_READ_ONLY	(1 << 0)

/**
 * struct basalt_create_vcpu - a vCPU on a CPU of the claim
 * @cpu: the number of the CPU, as Linux counts them
 * @apic_id: its APIC's id, as the guest sees it: any but 0xffffffff, whatever that of the CPU is
 * @reserved: zero
 */
struct basalt_create_vcpu {
	__u32 cpu;
	__u32 apic_id;
	__u32 reserved[6];
};

/**
 * struct basalt_cpuid_entry - what CPUID says to the guest
 * @function: EAX
 * @index: ECX, if @flags has BASALT_CPUID_INDEX
 * @flags: BASALT_CPUID_INDEX or none
 * @eax: what it says
 * @ebx: and
 * @ecx: and
 * @edx: and
 * @reserved: zero
 */
struct basalt_cpuid_entry {
	__u32 function;
	__u32 index;
	__u32 flags;
	__u32 eax;
	__u32 ebx;
	__u32 ecx;
	__u32 edx;
	__u32 reserved;
};

#define BASALT_CPUID_INDEX	(1 << 0)
#define BASALT_MAX_CPUID	256

/**
 * struct basalt_cpuid - all of it, for all vCPUs: where a leaf has the id of the APIC (1, 0xb, 0x1f, 0x8000001e) it is each vCPU's own
 * @count: how many of @entries are given; what is none of them is zeroes
 * @reserved: zero
 * @entries: they
 */
struct basalt_cpuid {
	__u32 count;
	__u32 reserved[7];
	struct basalt_cpuid_entry entries[BASALT_MAX_CPUID];
};

/*
 * On a machine; all but the first before its first BASALT_RUN, EBUSY
 * afterwards. BASALT_MAP_MEMORY pins the pages, and counts them as locked
 * (ENOMEM beyond RLIMIT_MEMLOCK); EEXIST where the guest has memory already.
 * A guest that touches what is not mapped yet exits (BASALT_EXIT_MEMORY).
 * BASALT_CREATE_VCPU returns a descriptor; ENODEV for a CPU that is not of the
 * claim, EEXIST for one that has a vCPU, or an id that a vCPU has.
 * BASALT_SET_CPUID is for all vCPUs.
 */
#define BASALT_MAP_MEMORY	_IOW(0xba, 0x20, struct basalt_memory)
#define BASALT_CREATE_VCPU	_IOW(0xba, 0x21, struct basalt_create_vcpu)
#define BASALT_SET_CPUID	_IOW(0xba, 0x22, struct basalt_cpuid)

/*
 * On a machine, at any time: a device's registers that this process has mapped
 * (VFIO), and that its guest reaches there without an exit from now on. When
 * they are taken from the process, by whomever, they are taken from the guest,
 * which exits there again. BASALT_UNMAP_DEVICE wants what was given before.
 * Errors: EEXIST (the guest has something there), EINVAL (no registers that
 * can be written), EFAULT (the driver does not give them); to unmap, ENOENT.
 */
#define BASALT_MAP_DEVICE	_IOW(0xba, 0x23, struct basalt_memory)
#define BASALT_UNMAP_DEVICE	_IOW(0xba, 0x24, struct basalt_memory)

/**
 * struct basalt_place - where a machine with BASALT_VM_IDENTITY has its memory
 * @start: its physical address, a multiple of BASALT_PIECE
 * @size: bytes
 * @low_start: of what is below 1 MiB; whole pages
 * @low_size: bytes
 * @reserved: zero
 */
struct basalt_place {
	__u64 start;
	__u64 size;
	__u64 low_start;
	__u64 low_size;
	__u32 reserved[8];
};

/*
 * On a machine with BASALT_VM_IDENTITY; EOPNOTSUPP on others. Its descriptor
 * can be mapped, shared: the offset is the physical address, and all of it is
 * in one of the two pieces (EINVAL). A mapping keeps the machine. It cannot be
 * given other memory, or a device's registers (EOPNOTSUPP of BASALT_MAP_MEMORY
 * and those below it).
 */
#define BASALT_GET_PLACE	_IOR(0xba, 0x25, struct basalt_place)

struct basalt_regs {
	__u64 rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp;
	__u64 r8, r9, r10, r11, r12, r13, r14, r15;
	__u64 rip, rflags;
};

/* As the vendor's control block has it: attributes are bits 8 to 15 and 20 to 23 of a descriptor, together. */
struct basalt_segment {
	__u64 base;
	__u32 limit;
	__u16 selector;
	__u16 attributes;
};

/**
 * struct basalt_state - what a vCPU is made of, but for its FPU and its APIC
 * @regs: general registers
 * @es: and the others: segments
 * @cr0: control registers; @cr8 is the APIC's
 * @efer: model-specific registers, by their names
 * @interruptibility: BASALT_STATE_*
 * @event: what is delivered at the next entry, as the vendor's control block has it: its vector, type (bits 8 to 10),
 *         whether it has an error code (bit 11), and whether there is one (bit 31); an error code in the upper half
 * @reserved: zero
 */
struct basalt_state {
	struct basalt_regs regs;
	struct basalt_segment es, cs, ss, ds, fs, gs, gdtr, ldtr, idtr, tr;
	__u64 cr0, cr2, cr3, cr4;
	__u64 dr6, dr7;
	__u64 efer, pat;
	__u64 star, lstar, cstar, sfmask, kernel_gs_base;
	__u64 sysenter_cs, sysenter_esp, sysenter_eip;
	__u64 tsc_offset;
	__u32 interruptibility;
	__u32 reserved0;
	__u64 event;
	__u32 reserved[28];
};

#define BASALT_STATE_SHADOW	(1 << 0)	/* interrupts wait for the instruction behind this one */
#define BASALT_STATE_IN_NMI	(1 << 1)	/* NMIs wait for an IRET */
#define BASALT_STATE_NO_NMI	(1 << 2)	/* set only: an NMI that waits is forgotten */
#define BASALT_STATE_NMI	(1 << 3)	/* an NMI waits */
#define BASALT_STATE_ALL	0xf

/* Bytes of an XSAVE area in its standard format, as far as guests' states go. */
#define BASALT_XSAVE_BYTES	4096

/* The x2APIC's registers, by their numbers from 0x800 on. */
#define BASALT_APIC_REGISTERS	64

/**
 * struct basalt_context - what a vCPU has on its CPU itself: its FPU, its APIC and a few registers
 * @xsave: the XSAVE area in its standard format, without states that do not fit
 * @xcr0: which states the guest has switched on
 * @dr: debug addresses, 0 to 3
 * @tsc_aux: what RDTSCP tells beside the time
 * @timer_khz: out: how fast the APIC's timer counts before it is divided, within some percent; zero where it could not be seen
 * @reserved0: zero
 * @apic: the x2APIC's registers; where one has 64 bits, or is not there, zero. Taken over are TPR, SVR, ISR, IRR, all
 *        local vectors but the thermal one, and the timer: one that counts once goes on with what is left of it, a
 *        periodic one begins anew
 * @reserved: zero
 */
struct basalt_context {
	__u8 xsave[BASALT_XSAVE_BYTES];
	__u64 xcr0;
	__u64 dr[4];
	__u64 tsc_aux;
	__u32 timer_khz;
	__u32 reserved0;
	__u32 apic[BASALT_APIC_REGISTERS];
	__u32 reserved[48];
};

/* Why a vCPU came out. */
#define BASALT_EXIT_INTERRUPTED	0	/* somebody wanted it: a signal */
#define BASALT_EXIT_IO		1	/* a port */
#define BASALT_EXIT_MEMORY	2	/* what is no memory of the guest */
#define BASALT_EXIT_MSR		3	/* a model-specific register that the module leaves to others */
#define BASALT_EXIT_HYPERCALL	4	/* VMMCALL */
#define BASALT_EXIT_SHUTDOWN	5	/* a triple fault */
#define BASALT_EXIT_FAILED	6	/* the CPU refused, or something nobody knows */

/* What exits are counted by; those that no user sees as well. */
enum basalt_count {
	BASALT_COUNT_IO,
	BASALT_COUNT_MEMORY,
	BASALT_COUNT_MSR,
	BASALT_COUNT_CPUID,
	BASALT_COUNT_HYPERCALL,
	BASALT_COUNT_NMI,
	BASALT_COUNT_OTHER,
	BASALT_COUNT_ICR,	/* writes to the interrupt command register */
	BASALT_COUNT_REFUSED,	/* of all those: what no guest may do, and what reached nobody */
	BASALT_COUNTS,
};

/**
 * struct basalt_run - the page that a vCPU's descriptor maps
 * @reason: BASALT_EXIT_*
 * @immediate_exit: not 0: the next BASALT_RUN does no more than finish what the last exit asked, and says that it was interrupted
 * @io: of a port: its number, bytes (1, 2, 4), whether the guest writes, and what; what it reads is answered in @value
 * @memory: of memory: the guest's physical address, and the page fault's error code
 * @msr: of a register: its number, whether the guest writes, and what; what it reads is answered in @value, and
 *       @fault makes it a general protection fault
 * @failed: of a failure: the vendor's exit code and what came with it
 * @counts: exits since the vCPU was made, by enum basalt_count
 */
struct basalt_run {
	__u32 reason;
	__u32 immediate_exit;
	__u32 reserved[14];
	union {
		struct {
			__u16 port;
			__u8 size;
			__u8 write;
			__u32 value;
		} io;
		struct {
			__u64 address;
			__u64 error;
		} memory;
		struct {
			__u32 index;
			__u8 write;
			__u8 fault;
			__u16 reserved;
			__u64 value;
		} msr;
		struct {
			__u64 code;
			__u64 info1;
			__u64 info2;
		} failed;
		__u64 all[24];
	};
	__u64 counts[32];
};

/**
 * struct basalt_interrupt - an interrupt for a vCPU
 * @vector: the guest's own, 32 to 255
 * @reserved: zero
 */
struct basalt_interrupt {
	__u32 vector;
	__u32 reserved[7];
};

/**
 * struct basalt_irq - interrupts of a device that the guest has been given
 * @event: a descriptor of the eventfd that stands for the interrupt; who holds the device (VFIO) was given the same
 * @vector: the guest's own, 32 to 255; zero to detach
 * @reserved: zero
 */
struct basalt_irq {
	__s32 event;
	__u32 vector;
	__u32 reserved[6];
};

/*
 * On a vCPU. BASALT_RUN returns when the vCPU has come out, and why is in the
 * page; EINTR after a signal. What an exit asks is answered in the page before
 * the next BASALT_RUN; EIO from a CPU that does not hear, which is lost until the
 * next boot. Those of state and context are for a vCPU that does not run
 * (EBUSY), the other two for one that may: BASALT_INTERRUPT is an IPI, and no
 * exit; BASALT_NMI, a non-maskable interrupt for the guest, makes two.
 * BASALT_SET_STATE refuses types of memory that there are not (@pat; EINVAL).
 * BASALT_SET_CONTEXT refuses what the processor would (EINVAL). Both contexts
 * are read and written by the CPU itself (EIO as above).
 */
#define BASALT_RUN		_IO(0xba, 0x30)
#define BASALT_GET_STATE	_IOR(0xba, 0x31, struct basalt_state)
#define BASALT_SET_STATE	_IOW(0xba, 0x32, struct basalt_state)
#define BASALT_INTERRUPT	_IOW(0xba, 0x33, struct basalt_interrupt)
#define BASALT_NMI		_IO(0xba, 0x34)
#define BASALT_GET_CONTEXT	_IOR(0xba, 0x35, struct basalt_context)
#define BASALT_SET_CONTEXT	_IOW(0xba, 0x36, struct basalt_context)

/*
 * On a vCPU, whether it runs or not. From BASALT_ATTACH_IRQ on, each signal of
 * the eventfd is an interrupt of the vector, as by BASALT_INTERRUPT, and what
 * it was signalled before is one. Where the kernel knows the interrupt that
 * the eventfd stands for and can point that at the vCPU's CPU, it does: then
 * 1 is returned, the host does not see the interrupt any more, and the
 * eventfd is not signalled. 0: each is relayed, at least for now.
 * BASALT_DETACH_IRQ undoes it, and so does closing the vCPU; afterwards the
 * eventfd is signalled and keeps that. Errors: EBADF and EINVAL (no eventfd),
 * EEXIST (it is attached), EBUSY (somebody else has attached it); to detach,
 * ENOENT (it is not attached to this vCPU).
 */
#define BASALT_ATTACH_IRQ	_IOW(0xba, 0x37, struct basalt_irq)
#define BASALT_DETACH_IRQ	_IOW(0xba, 0x38, struct basalt_irq)

/*
 * Servers without a CPU of their own. A guest that serves others says by
 * VMMCALL, with BASALT_CALL_WAIT in RAX, that it has nothing to do; that is
 * a hypercall like any other (BASALT_EXIT_HYPERCALL) until its vCPU is frozen
 * (BASALT_FREEZE). A guest whose vCPU is linked to that one (BASALT_LINK) says
 * by VMMCALL, with BASALT_CALL_ENTER in RAX and the link's number in RCX, that
 * the server is to run in its place, on its CPU, until that waits again; at
 * any privilege level. Then it has one of BASALT_ENTERED_* in RAX, and all
 * other registers as before; the server has 0 there. What is asked, and the
 * answers, are in memory that both have.
 */
#define BASALT_CALL_WAIT	0x62617361746c0001ULL
#define BASALT_CALL_ENTER	0x62617361746c0002ULL

#define BASALT_ENTERED_DONE		0	/* the server waits again */
#define BASALT_ENTERED_INTERRUPTED	1	/* an interrupt for who entered, or somebody wants its vCPU: enter again */
#define BASALT_ENTERED_BUSY		2	/* it runs on another CPU, or waits for its user space: enter again later */
#define BASALT_ENTERED_LATE		3	/* its time was over; it goes on where it was when it is entered again */
#define BASALT_ENTERED_HALTED		4	/* it has halted, and nothing but its user space can wake it */
#define BASALT_ENTERED_GONE		5	/* it has ended */
#define BASALT_ENTERED_NONE		6	/* there is no such link */

/* Links of one vCPU. */
#define BASALT_MAX_LINKS	4

/**
 * struct basalt_freeze - how a vCPU serves
 * @budget_us: for how long it may run at once, in microseconds: 100 to 10000000
 * @reserved: zero
 */
struct basalt_freeze {
	__u32 budget_us;
	__u32 reserved[7];
};

/**
 * struct basalt_link - a server for a vCPU
 * @server: what BASALT_FREEZE of another machine's vCPU has given; -1 to end the link
 * @index: its number, below BASALT_MAX_LINKS
 * @reserved: zero
 */
struct basalt_link {
	__s32 server;
	__u32 index;
	__u32 reserved[6];
};

/*
 * On a vCPU that does not run (EBUSY). BASALT_FREEZE is for one that has come
 * out with BASALT_CALL_WAIT, and is the only one of its machine (EINVAL);
 * EOPNOTSUPP with BASALT_VM_IDENTITY. It answers with a descriptor that is good
 * for BASALT_LINK and for nothing else, and keeps nothing. The vCPU gives its
 * CPU back: the claim is Linux's as soon as this process has closed it as well. From then on it has no
 * interrupts and no timer, and what it writes to its APIC is lost.
 * BASALT_RUN of it waits until it asks for something, which is answered as
 * ever, or has ended (BASALT_EXIT_SHUTDOWN, BASALT_EXIT_FAILED). Those of state
 * are for one that asks (EBUSY); those of context, interrupts, NMIs and
 * BASALT_ATTACH_IRQ are refused (EOPNOTSUPP), and so is freezing it again
 * (EEXIST). It ends with the last copy of the vCPU's own descriptor, whatever
 * is linked to it.
 *
 * BASALT_LINK errors: EBADF and EINVAL (no frozen vCPU, or one of the same
 * machine), ESRCH (the server's descriptor was closed), EEXIST (the number has a link), ENOENT (it has none, to end it),
 * EOPNOTSUPP (of a frozen vCPU, or with BASALT_VM_IDENTITY).
 */
#define BASALT_FREEZE		_IOW(0xba, 0x39, struct basalt_freeze)
#define BASALT_LINK		_IOW(0xba, 0x3a, struct basalt_link)

#endif
