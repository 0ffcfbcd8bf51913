/* Intrusive doubly linked list: a ring through members of the listed structs, with one more node
 * as its head. Every operation is O(1), nothing is allocated.
 *
 * A node is in at most one list. A node that is in none points at itself, so removing it again is
 * harmless and dkv_list_linked() can tell.
 *
 * Owner   whoever owns the listed structs; the list only borrows them.
 * Thread  that of the list's user.
 */
#ifndef DKV_SERVER_LIST_H
#define DKV_SERVER_LIST_H

#include <stdbool.h>
#include <stddef.h>

struct dkv_list {
    struct dkv_list *prev;
    struct dkv_list *next;
};

/* The struct of which `node` is the member. */
#define DKV_LIST_OF(node, type, member) ((type *)(void *)((char *)(node)-offsetof(type, member)))

/* Walks the list; the body must not remove `node`. */
#define DKV_LIST_EACH(node, list) \
    for (struct dkv_list *node = (list)->next; node != (list); node = node->next)

/* Walks the list; the body may remove `node`, and nothing else. */
#define DKV_LIST_EACH_SAFE(node, list)                                                    \
    for (struct dkv_list *node = (list)->next, *node##_next = node->next; node != (list); \
         node = node##_next, node##_next = node->next)

static inline void dkv_list_init(struct dkv_list *node)
{
    node->prev = node;
    node->next = node;
}

static inline bool dkv_list_linked(const struct dkv_list *node)
{
    return node->next != node;
}

static inline bool dkv_list_empty(const struct dkv_list *list)
{
    return list->next == list;
}

static inline void dkv_list_push_back(struct dkv_list *list, struct dkv_list *node)
{
    node->prev = list->prev;
    node->next = list;
    list->prev->next = node;
    list->prev = node;
}

static inline void dkv_list_push_front(struct dkv_list *list, struct dkv_list *node)
{
    node->prev = list;
    node->next = list->next;
    list->next->prev = node;
    list->next = node;
}

static inline void dkv_list_remove(struct dkv_list *node)
{
    node->prev->next = node->next;
    node->next->prev = node->prev;
    dkv_list_init(node);
}

/* NULL if the list is empty. */
static inline struct dkv_list *dkv_list_first(const struct dkv_list *list)
{
    return list->next == list ? NULL : list->next;
}

#endif
