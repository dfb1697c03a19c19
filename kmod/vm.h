/* SPDX-License-Identifier: GPL-2.0 */
/* A virtual machine, its memory and its vCPUs, as the files that run them see them. */
#ifndef _BASALT_VM_H
#define _BASALT_VM_H

#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>

#include "basalt.h"
#include "uapi/basalt.h"

struct vmcb;

/**
 * struct basalt_tables - a second-stage page table
 * @root: its uppermost page
 * @pages: all pages of it, by their struct page's lru
 */
struct basalt_tables {
	u64 *root;
	struct list_head pages;
};

int basalt_tables_init(struct basalt_tables *tables);
void basalt_tables_free(struct basalt_tables *tables);
int basalt_tables_prepare(struct basalt_tables *tables, u64 guest, unsigned long count);
void basalt_tables_map_device(struct basalt_tables *tables, u64 guest, const unsigned long *pages, unsigned long count);
bool basalt_tables_unmap(struct basalt_tables *tables, u64 guest, unsigned long count);
int basalt_tables_map(struct basalt_tables *tables, u64 guest, struct page **pages, unsigned long count, bool write);

/**
 * struct basalt_piece - physical memory that Linux does not have
 * @list: in the pool, by addresses; while it is somebody's
 * @start: its first address
 * @size: bytes; zero where there is none
 */
struct basalt_piece {
	struct list_head list;
	u64 start;
	u64 size;
};

#define BASALT_NO_APIC	U32_MAX

/**
 * struct basalt_apic - how a vCPU is reached
 * @id: its APIC's id, as the guest knows it; BASALT_NO_APIC where there is none
 * @physical: the id of the APIC that it has
 */
struct basalt_apic {
	u32 id;
	u32 physical;
};

/**
 * enum basalt_job - what a vCPU is to do on its CPU
 * @BASALT_JOB_RUN: to run its guest
 * @BASALT_JOB_SAVE: to write its context
 * @BASALT_JOB_LOAD: to read it
 */
enum basalt_job {
	BASALT_JOB_RUN,
	BASALT_JOB_SAVE,
	BASALT_JOB_LOAD,
};

/**
 * enum basalt_server_state - what a frozen vCPU does
 * @BASALT_SERVER_WAITS: nothing: its guest waits to be entered
 * @BASALT_SERVER_PAUSED: nothing: its guest is in the middle of something
 * @BASALT_SERVER_RUNS: it runs in the place of another vCPU
 * @BASALT_SERVER_ASKS: its user space has to answer something
 * @BASALT_SERVER_ENDED: nothing any more
 *
 *  WAITS or PAUSED -> RUNS -> WAITS, PAUSED, ASKS or ENDED
 *  ASKS -> PAUSED                 any but RUNS -> ENDED
 *
 * Who makes the step to RUNS has the vCPU until it makes the next one.
 */
enum basalt_server_state {
	BASALT_SERVER_WAITS,
	BASALT_SERVER_PAUSED,
	BASALT_SERVER_RUNS,
	BASALT_SERVER_ASKS,
	BASALT_SERVER_ENDED,
};

/**
 * struct basalt_server - a frozen vCPU, for itself and for whoever is linked to it
 * @users: they, and each file that links are made by
 * @id: no other ever has this number
 * @state: one of enum basalt_server_state
 * @vcpu: which; until it has ended
 * @vm: its machine, to tell it from others; it may be gone
 * @context: its FPU while it does not run
 * @cpu: where it runs, or has run last
 * @since: the time stamp counter at its entry, while it runs and @cpu says where; zero otherwise
 * @budget: for how long it may, in ticks of that
 * @asked: its user space knows what it asks
 * @late: the run that began then is to come out, because that is over
 * @stop: it is to come out because it ends
 * @period: how often its time is looked at, in jiffies
 * @watch: who looks, from the first link until it ends
 * @ending: for @over, and for beginning to look
 * @over: its descriptor was closed: nobody is to look any more
 */
struct basalt_server {
	struct kref users;
	u64 id;
	int state;
	struct basalt_vcpu *vcpu;
	const struct basalt_vm *vm;
	struct basalt_context *context;
	unsigned int cpu;
	u64 since;
	u64 budget;
	bool asked;
	u64 late;
	bool stop;
	unsigned long period;
	struct delayed_work watch;
	spinlock_t ending;
	bool over;
};

/**
 * struct basalt_vm - a virtual machine
 * @claim: the file of the claim whose CPUs it has; none once it is frozen
 * @lock: for all that follows, until a vCPU has run
 * @regions: its memory
 * @windows: and devices' registers, which may come and go
 * @mapping: for the entries of those in @tables, and for @vcpus; taken where pages are taken from the process
 * @vcpus: by their list
 * @tables: the same, for the CPU
 * @identity: nobody translates its addresses: it has no @regions and @windows, and @tables are not used
 * @main: then its memory
 * @low: and what of that is below 1 MiB
 * @ran: nothing of it changes any more, but for @windows, and @regions that come
 * @lost: a CPU may use it for ever
 * @msr_map: which registers the guest may touch; two pages
 * @io_map: which ports; three pages
 * @cpuid: what CPUID says
 * @apics: of its vCPUs, in any order
 */
struct basalt_vm {
	struct kref users;
	struct file *claim;
	struct mutex lock;
	struct list_head regions;
	struct list_head windows;
	struct mutex mapping;
	struct list_head vcpus;
	struct basalt_tables tables;
	bool identity;
	struct basalt_piece main;
	struct basalt_piece low;
	bool ran;
	bool lost;
	void *msr_map;
	void *io_map;
	struct basalt_cpuid *cpuid;
	struct basalt_apic apics[BASALT_MAX_CPUS];
};

/**
 * struct basalt_vcpu - a vCPU
 * @list: in struct basalt_vm
 * @vm: whose
 * @cpu: where
 * @apic_id: the id of its APIC, as the guest knows it
 * @physical_id: the id of the APIC there
 * @timer_khz: how fast that one's timer counts
 * @icr: what the guest has last written to its interrupt command register
 * @job: what it is to do next, one of enum basalt_job
 * @context: of such a job; its XSAVE area is aligned
 * @lock: whoever has it runs the vCPU, or looks at its state
 * @regs: what is not in the control block
 * @vmcb: the vendor's control block
 * @host: what VMSAVE keeps of the host, a page
 * @save: where the CPU keeps more of the host (VM_HSAVE_PA), a page
 * @run: the page that user space sees
 * @vmcb_pa: the physical address of the control block
 * @host_pa: and of @host
 * @save_pa: and of @save
 * @ran: it has run: what is on the CPU beside the control block is its own
 * @stop: it is to come out
 * @flush: what its CPU remembers of the machine's tables is to be forgotten before it runs
 * @lost: it does not; the CPU may use it for ever
 * @nmi: its guest is to get an NMI
 * @in_nmi: its own: the guest has got one, and no IRET has followed
 * @answer: what has to be done about the last exit before the next entry
 * @sending: for @server, while something is sent to its CPU: one that is frozen has none
 * @server: what it is when it is frozen
 * @links: whom it can enter
 * @aside: its FPU while it has entered one; there as soon as there has been a link
 */
struct basalt_vcpu {
	struct list_head list;
	struct basalt_vm *vm;
	unsigned int cpu;
	u32 apic_id;
	u32 physical_id;
	u32 timer_khz;
	u64 icr;
	enum basalt_job job;
	struct basalt_context *context;
	struct mutex lock;
	struct basalt_regs regs;
	struct vmcb *vmcb;
	void *host;
	void *save;
	struct basalt_run *run;
	u64 vmcb_pa, host_pa, save_pa;
	bool ran;
	bool stop;
	bool flush;
	bool lost;
	bool nmi;
	bool in_nmi;
	u32 answer;
	spinlock_t sending;
	struct basalt_server *server;
	struct basalt_server *links[BASALT_MAX_LINKS];
	struct basalt_context *aside;
};

/* main.c */
bool basalt_claim_has(struct file *claim, unsigned int cpu);

/* claim.c */
int basalt_cpu_take(struct basalt_vcpu *vcpu);
void basalt_cpu_forget(struct basalt_vcpu *vcpu);
int basalt_cpu_run(struct basalt_vcpu *vcpu);

/* vm.c */
long basalt_vm_create(struct file *claim, const struct basalt_create_vm __user *user);
void basalt_vm_put(struct basalt_vm *vm);
void basalt_vm_leave_claim(struct basalt_vm *vm);

/* pool.c */
int basalt_pool_init(void);
void basalt_pool_exit(void);
void basalt_pool_tell(u64 *total, u64 *free);
int basalt_pool_take(u64 size, struct basalt_piece *main, struct basalt_piece *low);
void basalt_pool_give(struct basalt_piece *piece);

/* serve.c: servers, as seen from CPUs that are Linux's. */
long basalt_freeze(struct basalt_vcpu *vcpu, const struct basalt_freeze __user *user);
long basalt_link(struct basalt_vcpu *vcpu, const struct basalt_link __user *user);
long basalt_server_run(struct basalt_vcpu *vcpu);
bool basalt_server_asks(const struct basalt_vcpu *vcpu);
void basalt_server_put(struct basalt_server *server);
void basalt_server_end(struct basalt_vcpu *vcpu);
void basalt_links_drop(struct basalt_vcpu *vcpu);
void basalt_servers_look(void);
bool basalt_runs(const struct basalt_vcpu *vcpu);
void basalt_pull_once(const struct basalt_vcpu *vcpu);

/* switch.c: and from one that runs guests. */
u64 basalt_switch(struct basalt_cpu *self, struct basalt_vcpu *vcpu);

/* vcpu.c */
struct basalt_context *basalt_new_context(void);
void basalt_free_context(struct basalt_context *context);
void basalt_vcpu_hide(struct basalt_vcpu *vcpu);
long basalt_vcpu_create(struct basalt_vm *vm, const struct basalt_create_vcpu __user *user);

/* window.c */
bool basalt_window_at(struct basalt_vm *vm, const struct basalt_memory *asked);
long basalt_window_map(struct basalt_vm *vm, const struct basalt_memory *asked);
long basalt_window_unmap(struct basalt_vm *vm, const struct basalt_memory *asked);
void basalt_windows_free(struct basalt_vm *vm);

/* route.c */
long basalt_route_attach(struct basalt_vcpu *vcpu, const struct basalt_irq __user *user);
long basalt_route_detach(struct basalt_vcpu *vcpu, const struct basalt_irq __user *user);
void basalt_routes_drop(struct basalt_vcpu *vcpu);
void basalt_routes_exit(void);

/* svm.c */
void basalt_svm_init(void);
bool basalt_svm_usable(void);
int basalt_svm_init_vm(struct basalt_vm *vm);
void basalt_svm_free_vm(struct basalt_vm *vm);
void basalt_svm_init_vcpu(struct basalt_vcpu *vcpu);
void basalt_svm_get_state(struct basalt_vcpu *vcpu, struct basalt_state *state);
bool basalt_svm_bears(const struct basalt_state *state);
void basalt_svm_set_state(struct basalt_vcpu *vcpu, const struct basalt_state *state);
void basalt_svm_freeze(struct basalt_vcpu *vcpu);

/**
 * enum basalt_sent - what has become of a write to the ICR
 * @BASALT_SENT: somebody has got it
 * @BASALT_SENT_NOBODY: there is nobody, or no such interrupt
 * @BASALT_SENT_BY_USER: user space has to do it
 */
enum basalt_sent {
	BASALT_SENT,
	BASALT_SENT_NOBODY,
	BASALT_SENT_BY_USER,
};

/* By which an x2APIC is addressed logically: a cluster, and a bit of sixteen in it (AMD64 APM 2, 16.14). */
static inline u32 basalt_logical_id(u32 apic_id)
{
	return (apic_id >> 4) << 16 | BIT(apic_id & 15);
}

/* icr.c: on a CPU that Linux believes to be dead. */
enum basalt_sent basalt_icr_write(struct basalt_vcpu *vcpu, u64 value);

/* svm_run.c: on a CPU that Linux believes to be dead. */
void basalt_svm_run(struct basalt_cpu *self, struct basalt_vcpu *vcpu);
void basalt_svm_step(struct basalt_cpu *self, struct basalt_vcpu *vcpu);
bool basalt_svm_handle(struct basalt_cpu *self, struct basalt_vcpu *vcpu);
void basalt_svm_finish(struct basalt_vcpu *vcpu);
void basalt_svm_leave(struct basalt_cpu *self);
void basalt_svm_wake(u64 command);

/* predict.c: but for the first on a CPU that Linux believes to be dead. */
void basalt_predict_init(void);
void basalt_predict_nothing(void);
void basalt_predict_for_guests(struct basalt_cpu *self);
void basalt_predict_restore(struct basalt_cpu *self);

/* fpu.c: but for the first on a CPU that Linux believes to be dead. */
void basalt_fpu_init(void);
void basalt_fpu_keep(struct basalt_cpu *self);
void basalt_fpu_for_guest(struct basalt_cpu *self);
void basalt_fpu_restore(struct basalt_cpu *self);
bool basalt_fpu_bears(const struct basalt_context *context);
void basalt_fpu_save(struct basalt_cpu *self, struct basalt_context *context);
void basalt_fpu_load(struct basalt_cpu *self, const struct basalt_context *context);

/* lapic.c: but for the first on a CPU that Linux believes to be dead. */
bool basalt_lapic_bears(const struct basalt_context *context);
void basalt_lapic_drain(void);
u32 basalt_lapic_timer_khz(u32 tsc_khz);
void basalt_lapic_save(struct basalt_vcpu *vcpu);
void basalt_lapic_load(struct basalt_vcpu *vcpu);

#endif
