"""An LSTM language model that carries its hidden state from one step to the next."""

import argparse

import torch
import torch.nn as nn


class RNNModel(nn.Module):
    def __init__(self, ntoken=33278, ninp=400, nhid=400, nlayers=2, dropout=0.5):
        super().__init__()
        self.nhid, self.nlayers, self.ntoken = nhid, nlayers, ntoken
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.decoder.weight = self.encoder.weight  # tied

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
        return decoded, hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid)


def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


class LanguageModel:
    def __init__(self, lr=20.0, clip=0.25):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = RNNModel().to(self.device)
        self.criterion = nn.CrossEntropyLoss()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.clip, self.hidden, self.total_loss = clip, None, 0.0

    def step(self, data, targets):
        data, targets = data.t().contiguous().to(self.device), targets.t().reshape(-1).to(self.device)
        if self.hidden is None:
            self.hidden = self.model.init_hidden(data.size(1))
        self.hidden = repackage_hidden(self.hidden)
        self.model.zero_grad()
        output, self.hidden = self.model(data, self.hidden)
        loss = self.criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.total_loss += loss.item()
        return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--bptt", type=int, default=35)
    args = parser.parse_args()
    corpus = torch.randint(33278, (args.batch_size, args.bptt * args.steps + 1))
    lm = LanguageModel()
    for i in range(0, corpus.size(1) - 1, args.bptt):
        loss = lm.step(corpus[:, i : i + args.bptt], corpus[:, i + 1 : i + 1 + args.bptt])
    print(lm.total_loss / args.steps)
