"""Reinforcement learning in the way of GRPO: sample answers, reward them, train; three models share the devices.

    torchrun --nproc-per-node 8 examples/rl_loop.py --model my-llama --steps 100
    python examples/rl_loop.py --toy

The policy trains under ZeRO-3 and generates in the same engine. A frozen copy, the reference, holds it near where it
began; it is an engine without an optimizer. While one phase runs, states that it does not need wait in host memory.
"""

import argparse

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import shardwise

PROMPTS = ["1 + 2 =", "4 + 4 =", "7 + 5 =", "3 + 9 ="]


def reward(text: str) -> float:
    """Return the share of digits; put the test of your task here."""
    return sum(each.isdigit() for each in text) / max(len(text), 1)


def make_engine(folder: str, config: dict) -> shardwise.Engine:
    with shardwise.init():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return shardwise.initialize(model, {"zero": {"stage": 3}, **config}, weights=folder)


def log_probs(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each token after the first."""
    return logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--model", help="a Hugging Face folder")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--group", type=int, default=4, help="answers to each prompt")
    args = parser.parse_args()
    if args.toy:
        from toy import make_toy

        args.model = make_toy()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    policy = make_engine(args.model, {"optimizer": {"lr": 1e-2 if args.toy else 1e-6, "weight_decay": 0.0}})
    reference = make_engine(args.model, {"optimizer": {"name": "none"}})
    say = print if torch.distributed.get_rank() == 0 else lambda *_: None
    mesh, rank = policy.layout.mesh, torch.distributed.get_rank()
    torch.manual_seed(mesh.data_index(rank))  # each data rank samples answers of its own
    for step in range(args.steps):
        prompt = tokenizer([PROMPTS[step % len(PROMPTS)]] * args.group, return_tensors="pt")["input_ids"]
        with policy.offloaded(["optimizer"]), policy.gathered() as model, torch.no_grad():
            model.eval()
            tokens = model.generate(prompt.to(policy.device), max_new_tokens=12, min_new_tokens=12, do_sample=True)
            model.train()
        is_answer = torch.arange(1, tokens.shape[1], device=tokens.device) >= prompt.shape[1]
        rewards = torch.tensor([reward(tokenizer.decode(each[prompt.shape[1] :])) for each in tokens])
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).to(tokens.device)
        with torch.no_grad():
            kept = log_probs(reference(input_ids=tokens).logits, tokens)
        ours = log_probs(policy(input_ids=tokens).logits, tokens)
        distance = (kept - ours).exp() - (kept - ours) - 1  # an estimate of the KL divergence, never negative
        objective = (ours - ours.detach()).exp() * advantages[:, None] - 0.01 * distance
        loss = -objective[:, is_answer].mean()
        policy.backward(loss)
        result = policy.step()
        say(f"step {result.step}: reward {rewards.mean():.3f}, loss {loss:.4f}, norm {result.grad_norm:.3f}")
    policy.close()
    reference.close()


if __name__ == "__main__":
    main()
